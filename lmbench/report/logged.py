"""A run as loggers show it: `section/name` for every number, in the unit that people read. Names come from the schema.

A section is what W&B, TensorBoard and others group charts by: `time`, `host`, `lag`, `throughput`, `memory`, `train`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from lmbench.records.run import RunRecord
from lmbench.records.schema import SchemaField, fields, value_at
from lmbench.records.step import SCALARS, StepRecord
from lmbench.records.summary import host_bound_fraction
from lmbench.report import units
from lmbench.report.units import MS, PERCENT, SECONDS, Unit

#: What a series is drawn over.
STEP = "step"

#: What the names of fields end in, by their unit; a number in another unit ends in that.
_ENDINGS = {
    "s": "_s", "bytes": "_bytes", "fraction": "_fraction", "FLOP/s": "_flops_per_s", "J/token": "joules_per_token",
}  # fmt: skip
_OTHER_UNITS = {
    "FLOP/s": Unit("TFLOP/s", 1e-12, units.plain, "_tflops_per_s"),
    "J/token": Unit("mJ/token", 1e3, units.plain, "millijoules_per_token"),
}

#: The section of a part of a run's record. Seconds are milliseconds only where a step is timed.
_SECTIONS = {
    "phases": "time", "throughput": "throughput", "memory": "memory", "memory_prediction": "memory",
    "loss": "train", "scalars": "train", "probe": "train", "compile": "compile", "device_state": "device",
    "window": "window", "sweep": "cost", "kernels": "kernels",
}  # fmt: skip
#: Tells a number of the run from the series of that name; probe steps come after the window's.
_PREFIXES = {"memory_prediction": "predicted_", "probe": "probed_", "scalars": "mean_"}
_IN_MILLISECONDS = ("time", "host", "lag", "kernels")

#: Of a run's record: what decides. A phase's mean has the name of its series.
SUMMARY = (
    "phases.<phase>.mean_s",
    "phases.step.std_s", "phases.step.min_s", "phases.step.median_s", "phases.step.p95_s", "phases.step.cv_fraction",
    "throughput.tokens_per_s", "throughput.mfu_fraction", "throughput.hfu_fraction", "throughput.model_flops_per_s",
    "throughput.joules_per_token",
    "memory.run_peak_allocated_bytes", "memory.run_peak_reserved_bytes", "memory.steady_peak_allocated_bytes",
    "memory.phase_peak_allocated_bytes.forward", "memory.phase_peak_allocated_bytes.backward",
    "memory.phase_peak_allocated_bytes.optimizer", "memory.host_peak_rss_bytes", "memory.run_alloc_retry_count",
    "memory.phase_begin_allocated_bytes.backward", "memory.saved_bytes",
    "memory_prediction.peak_allocated_bytes",
    "loss.first", "loss.last", "loss.mean", *(f"scalars.{name}" for name in SCALARS), "probe.training.gradient_norm",
    "compile.first_step_s", "compile.graph_count", "compile.graph_break_count",
    "device_state.mean_power_w", "device_state.mean_temperature_c", "device_state.power_capped_fraction",
    "device_state.sm_clock_drop_fraction",
    "window.steps", "window.wall_s", "window.skipped_count", "sweep.cost.total_s",
    "kernels.phases.step.kernel_s", "kernels.phases.forward.kernel_s", "kernels.phases.backward.kernel_s",
    "kernels.phases.optimizer.kernel_s", "kernels.phases.step.host_wait_s", "kernels.phases.step.matmul_fraction",
)  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """What makes rates of a step: the number of ranks, and the factor from tokens/s to MFU where there is one."""

    ranks: int = 1
    mfu_per_rate: float | None = None

    @staticmethod
    def of(run: RunRecord) -> Rates:
        flops, peak = run.flops.per_token_flops, run.flops.peak_flops_per_s
        return Rates(run.world_size or 1, flops / peak if flops is not None and peak else None)


@cache
def step_names() -> Mapping[str, tuple[str, float]]:
    """The series of each field of a step record, and what its value is multiplied by; of every number and flag."""
    return {
        field.name: _in_section(*_step_place(field), field.unit)
        for field in fields("step").values()
        if field.unit not in ("text", "tree", "index")
    }


def _step_place(field: SchemaField) -> tuple[str, str]:
    if field.pattern == "<phase>_host_s":
        return "host", f"{field.span}_s"
    if field.pattern == "lag_<border>_s":
        return "lag", f"{field.span}_s"
    return "time" if field.unit == "s" else "train", field.name


def _in_section(section: str, name: str, field_unit: str) -> tuple[str, float]:
    """The whole name of a number, and what it is multiplied by."""
    ending = _ENDINGS.get(field_unit)
    if ending is None:
        return f"{section}/{name}", 1.0
    unit = _OTHER_UNITS.get(field_unit) or units.unit_of(field_unit)
    if unit is MS and section not in _IN_MILLISECONDS:
        unit = SECONDS
    return f"{section}/{name.removesuffix(ending)}{unit.ending}", unit.scale


def of_step(step: StepRecord, rates: Rates) -> dict[str, float]:
    """A step's numbers by the names of their series, with its own tokens/s and MFU; nothing that was not measured."""
    found: dict[str, float] = {}
    for field, (name, scale) in step_names().items():
        value = getattr(step, field)
        if value is not None:
            found[name] = int(value) if isinstance(value, bool) else value if scale == 1.0 else value * scale
    if step.tokens is not None and step.step_s:
        rate = step.tokens * rates.ranks / step.step_s
        found[run_names()["throughput.tokens_per_s"][0]] = rate
        if rates.mfu_per_rate is not None:
            name, scale = run_names()["throughput.mfu_fraction"]
            found[name] = rate * rates.mfu_per_rate * scale
    return found


@cache
def run_names() -> Mapping[str, tuple[str, float]]:
    """The name of each number of SUMMARY in a run's record, and what it is multiplied by."""
    return {
        field.name: _in_section(*_run_place(field), field.unit)
        for name in SUMMARY
        for field in fields("run").values()
        if name in (field.name, field.pattern)
    }


def _run_place(field: SchemaField) -> tuple[str, str]:
    """Section and name: `phases.forward.std_s` is `time`, `forward_std_s`."""
    part, *own = field.name.split(".")
    section, last = _SECTIONS[part], own.pop()
    if part in ("phases", "kernels"):
        span = own[-1]
        return section, f"{span}_{last.removeprefix('mean_').removeprefix('kernel_')}"
    if field.span and last == field.span:
        # One number of each phase: `memory.phase_peak_allocated_bytes.forward`.
        return section, f"{last}_{own[-1].removeprefix('phase_')}"
    if part == "loss":
        return section, f"{last}_loss"
    return section, _PREFIXES.get(part, "") + last.removeprefix("run_")


def of_run(run: RunRecord) -> dict[str, float]:
    """What decides of a run, some 40 numbers; nothing that was not measured."""
    found: dict[str, float] = {}
    for field, (name, scale) in run_names().items():
        value = value_at(run, field)
        if value is not None:
            found[name] = value if scale == 1.0 else value * scale
    if (share := host_bound_fraction(run)) is not None:
        found[HOST_BOUND] = share * PERCENT.scale
    if run.kernels is not None and (step := run.kernels.phases.step) is not None:
        found |= dict(_kernel_times("kind", step.kinds)) | dict(_kernel_times("part", step.parts))
    return found


#: Share of the step in phases in which the device waited for the host.
HOST_BOUND = "time/host_bound_percent"


def kernel_name(what: str, name: str) -> str:
    """The name of a step's kernel time of a kind (`gemm`) or part of the model (`ffn`); `what` is `kind` or `part`."""
    return f"kernels/{what}_{name}{MS.ending}"


def _kernel_times(what: str, times_s: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    for name, value_s in times_s.items():
        yield kernel_name(what, name.removesuffix("_s")), value_s * MS.scale
