"""Are two groups of runs comparable? One table says what has to be the same, and what chooses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lmbench.errors import UsageError, suggest
from lmbench.records.guard import BUSY_MACHINE
from lmbench.records.load import Run
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
from lmbench.records.settings import (
    CHOSEN,
    as_text,
    brief,
    chosen_differences,
    is_named,
    setting_differences,
    settings,
    values_at,
)


@dataclass(frozen=True)
class Check:
    """One recorded fact, by its field's dotted name, that has to be the same on both sides.

    `set_by` are the settings that choose it: where one of them differs too, the fact is the thing compared and may
    differ. Without one (or where they are the same) a difference is no choice of the user's, and invalidates:
    `always`, or under `host` only where the host is part of what was measured (a CPU, or a lag near zero). A fact that
    is not recorded on a side differs from nothing.
    """

    field: str
    what: str
    rule: Literal["always", "host"] = "always"
    set_by: tuple[str, ...] = ()


def _flag(name: str, what: str, *set_by: str) -> Check:
    return Check(f"environment.flags.{name}", what, "always", set_by)


_COMPILE = ("is_enabled", "mode", "backend", "fullgraph", "dynamic", "regional")

CHECKS: tuple[Check, ...] = (
    Check("device_type", "the device type"),
    Check("environment.gpu.name", "the GPU"),
    Check("environment.gpu.sku", "the GPU's SKU"),
    Check("environment.gpu.is_mig", "MIG"),
    Check("environment.gpu.power_limit_w", "the power limit"),
    Check("mode", "the mode", set_by=("measure.mode", "mode")),
    Check("precision", "the precision", set_by=("trainer.precision", "trainer.plugins")),
    Check("matmul_precision", "the float32 matmul precision", set_by=("measure.matmul_precision",)),
    Check("clock", "the clock", set_by=("timer.clock",)),
    Check("zero_grad", "when gradients are zeroed", set_by=("measure.zero_grad",)),
    Check("gc_policy", "garbage collection"),
    Check("world_size", "the number of ranks", set_by=("trainer.devices", "trainer.num_nodes", "trainer.strategy")),
    Check("window.micro_batches", "micro-batches a step", set_by=("trainer.accumulate_grad_batches", "data", "model")),
    *(Check(f"compile.{name}", f"torch.compile ({name})", set_by=("trainer.compile",)) for name in _COMPILE),
    _flag("float32_matmul_precision", "float32 matmuls", "measure.matmul_precision"),
    _flag("cuda_matmul_allow_tf32", "TF32 in matmuls", "measure.matmul_precision"),
    _flag("cudnn_allow_tf32", "TF32 in cuDNN"),
    _flag("cudnn_benchmark", "cudnn.benchmark", "trainer.benchmark", "trainer.deterministic"),
    _flag("cudnn_deterministic", "cudnn.deterministic", "trainer.deterministic"),
    _flag("deterministic_algorithms", "deterministic algorithms", "trainer.deterministic"),
    _flag("anomaly_mode", "anomaly detection", "trainer.detect_anomaly"),
    _flag("allocator_backend", "the allocator", "sweep.environment"),
    Check("environment.host.hostname", "the host", "host"),
    Check("environment.host.cpu_model", "the CPU", "host"),
    Check("environment.host.core_count", "the number of cores", "host"),
    Check("environment.host.affinity", "the cores it may use", "host"),
    Check("environment.flags.thread_count", "PyTorch's threads", "host", ("sweep.environment",)),
)

#: Environment variables that name a place or repeat a setting; any other one that differs invalidates.
_PLACES = ("_DIR", "_HOME", "_PATH", "_FILE", "_VISIBLE_DEVICES", "_RUN_ID", "_CACHE")
_REPEATED = ("TORCHELASTIC_",)
_VARIABLES = "environment.variables"


def check_about(about: Iterable[str], runs: Sequence[Run]) -> None:
    """Raises UsageError for a name of `--about` that is nothing in these runs."""
    known = {check.field for check in CHECKS} | {*CHOSEN, _VARIABLES}
    for run in runs:
        known.update(settings(run.record), values_at(run.record, "environment"))
    for name in about:
        if not any(is_named(each, (name,)) for each in known):
            raise UsageError(f"--about {name}: these runs record nothing of that name{suggest(name, known)}")


def invalid_reasons(a: Sequence[Run], b: Sequence[Run], about: Sequence[str] = ()) -> list[str]:
    """Why runs of A and B are not comparable, a line each; none if they are.

    Args:
        about: names of what is compared. Without any, every setting may differ; with some, only these may.
    """
    changed = {difference.name for difference in setting_differences(a[0].record, b[0].record)}
    device_bound = host_reason([*a, *b]) is None
    reasons = []
    for check in CHECKS:
        asked = any(is_named(name, about) for name in (check.field, *check.set_by))
        if asked or (check.rule == "host" and device_bound) or _is_chosen(check, changed, a[0].record):
            continue
        mine, theirs = ([value_at(run.record, check.field) for run in side] for side in (a, b))
        known = [{as_text(value) for value in side if value is not None} for side in (mine, theirs)]
        reasons += _differing(check.what, check.field, *known)
    if "sweep.environment" not in changed:
        reasons += _variables(a, b, about)
    for name, runs in (("A", a), ("B", b)):
        reasons += [f"runs of {name} are not repeats of one thing: {line}" for line in mixture(runs)]
        reasons += failed_guards(name, runs)
    return reasons + (_not_asked(a[0].record, b[0].record, about) if about else [])


def mixture(runs: Sequence[Run]) -> list[str]:
    """Why runs are not repeats of one thing, a line each: they differ in code, versions, GPU or flags, or in the host
    where that is part of what was measured."""
    rules = ("always",) if host_reason(runs) is None else ("always", "host")
    found = []
    for name in (*CHOSEN, *(check.field for check in CHECKS if check.rule in rules)):
        values: dict[str, set[str]] = {}
        for run in runs:
            for leaf, value in values_at(run.record, name).items():
                values.setdefault(leaf, set()).add(as_text(value))
        found += [f"{leaf} is {_listed(texts)}" for leaf, texts in sorted(values.items()) if len(texts) > 1]
    return found


def host_reason(runs: Iterable[Run]) -> str | None:
    """Why the host is part of what was measured, None where the device had work queued in every phase."""
    for run in runs:
        if run.record.device_type != "cuda":
            return "on a CPU the host is what was measured"
        verdicts = dict(run.record.probe.verdicts.items()) if run.record.probe.verdicts else {}
        if not verdicts:
            return f"no probe step of {run.run_id} looked whether the device waits for the host"
        for phase, found in verdicts.items():
            if found.verdict != "queued":
                return f"{phase} of {run.run_id} is {found.verdict}: the host is part of what was measured"
    return None


def busy_reason(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    """Why a difference may be one of the machine's load, None where it may not: most runs of a side had to share the
    machine, and the host is part of what was measured."""
    if host_reason([*a, *b]) is None:
        return None
    for name, runs in (("A", a), ("B", b)):
        told = [guard.message for run in runs for guard in run.record.guards
                if guard.name == BUSY_MACHINE and guard.status == "warn"]  # fmt: skip
        if 2 * len(told) > len(runs):
            signs = told[0].partition(": ")[2]
            what_to_do = "measure again when it is quiet, or both sides in turn (lmbench compare --run)"
            return f"busy machine in {len(told)} of {len(runs)} runs of {name} ({signs}): {what_to_do}"
    return None


def _is_chosen(check: Check, changed: set[str], record: RunRecord) -> bool:
    """Whether the user set it apart: by a setting that differs, or in a script of their own, which records none."""
    if any(is_named(name, check.set_by) for name in changed):
        return True
    return bool(check.set_by) and record.config is None


def _differing(what: str, name: str, a: set[str], b: set[str]) -> list[str]:
    if not a or not b or a == b:
        return []
    hint = f"--about {name.removeprefix('environment.')}, if that is what you compare"
    return [f"{what} differs: A {_listed(a)}, B {_listed(b)} ({hint})"]


def _variables(a: Sequence[Run], b: Sequence[Run], about: Sequence[str]) -> list[str]:
    """Unlike other facts, a variable that is not there is known: it is unset."""
    environments = [[run.record.environment for run in side] for side in (a, b)]
    mine, theirs = ([e.variables for e in side if e is not None and e.variables is not None] for side in environments)
    if len(mine) < len(a) or len(theirs) < len(b):
        return []
    reasons = []
    for name in sorted({name for variables in (*mine, *theirs) for name in variables}):
        is_asked = is_named(f"{_VARIABLES}.{name}", about)
        if not is_asked and not name.endswith(_PLACES) and not name.startswith(_REPEATED):
            values = [{variables.get(name, "unset") for variables in side} for side in (mine, theirs)]
            reasons += _differing(f"environment variable {name}", f"{_VARIABLES}.{name}", *values)
    return reasons


def failed_guards(side: str, runs: Sequence[Run]) -> list[str]:
    """Guards that failed in runs of a side, a line each."""
    failed: dict[str, list[str]] = {}
    for run in runs:
        for guard in run.record.guards:
            if guard.status == "fail":
                failed.setdefault(guard.name, []).append(guard.message)
    return [
        f"guard {name} failed in {len(messages)} of {len(runs)} runs of {side}: {messages[0]}"
        for name, messages in failed.items()
    ]


def _not_asked(a: RunRecord, b: RunRecord, about: Sequence[str]) -> list[str]:
    """Differences other than those asked for; a setting that only one side knows is no difference of value."""
    others = [
        difference
        for difference in chosen_differences(a, b)
        if not is_named(difference.name, about)
        and (difference.name == "sweep.environment" or None not in (difference.a, difference.b))
    ]
    return [f"{difference}; the comparison is about {', '.join(about)}" for difference in others]


def _listed(values: Iterable[str]) -> str:
    return " or ".join(brief(value) for value in sorted(values))
