"""Guards on settings that slow every step, and on compilation inside the window."""

from __future__ import annotations

from collections.abc import Sequence

from lmbench.records.guards.guard import Guard, at_most, not_applicable
from lmbench.records.paths import lookup, number
from lmbench.records.vocabulary import Record


def launch_blocking(run: Record, steps: Sequence[Record]) -> Guard:
    """Fails if CUDA_LAUNCH_BLOCKING makes every kernel launch wait."""
    name = "launch_blocking"
    if run.get("device_type") != "cuda":
        return not_applicable(name, "not a CUDA device")
    variables = lookup(run, "environment.variables")
    if variables is None:
        return not_applicable(name, "the environment was not recorded")
    value = variables.get("CUDA_LAUNCH_BLOCKING", "0")
    if value in ("", "0"):
        return Guard(name, "pass", None, None, "", "kernels are launched without waiting")
    advice = "Unset CUDA_LAUNCH_BLOCKING and measure again."
    return Guard(name, "fail", None, None, "", f"CUDA_LAUNCH_BLOCKING={value}: every launch waits", advice)


def anomaly_mode(run: Record, steps: Sequence[Record]) -> Guard:
    """Fails if autograd's anomaly detection is on."""
    advice = (
        "Turn off detect_anomaly (--trainer.detect_anomaly false, torch.autograd.set_detect_anomaly) and measure again."
    )
    return _off("anomaly_mode", run, ("anomaly_mode",), "anomaly detection", advice)


def deterministic(run: Record, steps: Sequence[Record]) -> Guard:
    """Fails if PyTorch or cuDNN is kept to deterministic algorithms."""
    advice = (
        "Turn off deterministic mode (--trainer.deterministic, torch.use_deterministic_algorithms) and measure again."
    )
    flags = ("deterministic_algorithms", "cudnn_deterministic")
    return _off("deterministic", run, flags, "deterministic mode", advice)


def recompiles(run: Record, steps: Sequence[Record]) -> Guard:
    """Fails if torch.compile compiled something inside the window."""
    name = "recompiles"
    count = number(run, "compile.window_recompile_count")
    is_enabled = lookup(run, "compile.is_enabled")
    if is_enabled is False and not count:
        return not_applicable(name, "torch.compile is off")
    if count is None:
        return not_applicable(name, "recompilations were not counted")
    advice = "Warm up for longer and keep shapes fixed (drop_last, one batch size): the window timed the compiler."
    return at_most(
        name,
        count,
        0,
        "count",
        f"{count:.0f} graphs were compiled in the window",
        advice=advice,
        otherwise="fail",
    )


def _off(name: str, run: Record, flags: tuple[str, ...], what: str, advice: str) -> Guard:
    values = [lookup(run, f"environment.flags.{flag}") for flag in flags]
    if any(values):
        return Guard(name, "fail", None, None, "", f"{what} is on", advice)
    if all(value is None for value in values):
        return not_applicable(name, "the environment was not recorded")
    return Guard(name, "pass", None, None, "", f"{what} is off")
