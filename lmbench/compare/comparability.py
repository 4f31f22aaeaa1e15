"""Are two groups of runs comparable? One table says what has to be the same, and what chooses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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

#: Recorded facts that have to be the same on both sides, by dotted name, in words. A fact that is not recorded on a
#: side differs from nothing.
MUST_MATCH = {
    "device_type": "the device type",
    "environment.gpu.name": "the GPU",
    "environment.gpu.sku": "the GPU's SKU",
    "environment.gpu.is_mig": "MIG",
    "environment.gpu.power_limit_w": "the power limit",
    "mode": "the mode",
    "precision": "the precision",
    "matmul_precision": "the float32 matmul precision",
    "clock": "the clock",
    "zero_grad": "when gradients are zeroed",
    "gc_policy": "garbage collection",
    "world_size": "the number of ranks",
    "window.micro_batches": "micro-batches a step",
    "compile.is_enabled": "torch.compile (is_enabled)",
    "compile.mode": "torch.compile (mode)",
    "compile.backend": "torch.compile (backend)",
    "compile.fullgraph": "torch.compile (fullgraph)",
    "compile.dynamic": "torch.compile (dynamic)",
    "compile.regional": "torch.compile (regional)",
    "environment.flags.float32_matmul_precision": "float32 matmuls",
    "environment.flags.cuda_matmul_allow_tf32": "TF32 in matmuls",
    "environment.flags.cudnn_allow_tf32": "TF32 in cuDNN",
    "environment.flags.cudnn_benchmark": "cudnn.benchmark",
    "environment.flags.cudnn_deterministic": "cudnn.deterministic",
    "environment.flags.deterministic_algorithms": "deterministic algorithms",
    "environment.flags.anomaly_mode": "anomaly detection",
    "environment.flags.allocator_backend": "the allocator",
}
#: Facts that have to be the same only where the host is part of what was measured (a CPU, or a lag near zero).
HOST_MUST_MATCH = {
    "environment.host.hostname": "the host",
    "environment.host.cpu_model": "the CPU",
    "environment.host.core_count": "the number of cores",
    "environment.host.affinity": "the cores it may use",
    "environment.flags.thread_count": "PyTorch's threads",
}
#: Settings that choose a fact (or all facts of a part): where one of them differs too, the fact is the thing compared
#: and may differ. A difference of any other fact is no choice of the user's, and invalidates.
SET_BY: dict[str, tuple[str, ...]] = {
    "mode": ("measure.mode", "mode"),
    "precision": ("trainer.precision", "trainer.plugins"),
    "matmul_precision": ("measure.matmul_precision",),
    "clock": ("timer.clock",),
    "zero_grad": ("measure.zero_grad",),
    "world_size": ("trainer.devices", "trainer.num_nodes", "trainer.strategy"),
    "window.micro_batches": ("trainer.accumulate_grad_batches", "data", "model"),
    "compile": ("trainer.compile",),
    "environment.flags.float32_matmul_precision": ("measure.matmul_precision",),
    "environment.flags.cuda_matmul_allow_tf32": ("measure.matmul_precision",),
    "environment.flags.cudnn_benchmark": ("trainer.benchmark", "trainer.deterministic"),
    "environment.flags.cudnn_deterministic": ("trainer.deterministic",),
    "environment.flags.deterministic_algorithms": ("trainer.deterministic",),
    "environment.flags.anomaly_mode": ("trainer.detect_anomaly",),
    "environment.flags.allocator_backend": ("sweep.environment",),
    "environment.flags.thread_count": ("sweep.environment",),
}

#: Environment variables that name a place or repeat a setting; any other one that differs invalidates.
_PLACES = ("_DIR", "_HOME", "_PATH", "_FILE", "_VISIBLE_DEVICES", "_RUN_ID", "_CACHE")
_REPEATED = ("TORCHELASTIC_",)
_VARIABLES = "environment.variables"


def check_about(about: Iterable[str], runs: Sequence[Run]) -> None:
    """Raises UsageError for a name of `--about` that is nothing in these runs."""
    known = {*MUST_MATCH, *HOST_MUST_MATCH, *CHOSEN, _VARIABLES}
    for run in runs:
        known.update(settings(run.record), values_at(run.record, "environment"))
    for name in about:
        if not any(is_named(candidate, (name,)) for candidate in known):
            raise UsageError(f"--about {name}: these runs record nothing of that name{suggest(name, known)}")


def invalid_reasons(a: Sequence[Run], b: Sequence[Run], about: Sequence[str] = ()) -> list[str]:
    """Why runs of A and B are not comparable, a line each; none if they are.

    Args:
        about: names of what is compared. Without any, every setting may differ; with some, only these may.
    """
    changed = [difference.name for difference in setting_differences(a[0].record, b[0].record)]
    facts = {**MUST_MATCH, **(HOST_MUST_MATCH if host_reason([*a, *b]) else {})}
    reasons = []
    for name, title in facts.items():
        setters = next((setters for part, setters in SET_BY.items() if is_named(name, (part,))), ())
        # A script of the user's own records no settings: what could be chosen was.
        is_chosen = any(is_named(setting, setters) for setting in changed) or (setters and a[0].record.config is None)
        if not is_chosen and not any(is_named(alias, about) for alias in (name, *setters)):
            known = [[value for run in side if (value := value_at(run.record, name)) is not None] for side in (a, b)]
            reasons += _differing(title, name, *known)
    environments = [[run.record.environment for run in side if run.record.environment] for side in (a, b)]
    variables = [[each.variables for each in side if each.variables is not None] for side in environments]
    # Unlike other facts, a variable that is not there is known: it is unset.
    if "sweep.environment" not in changed and [len(side) for side in variables] == [len(a), len(b)]:
        for name in sorted({name for side in variables for each in side for name in each}):
            is_place = name.endswith(_PLACES) or name.startswith(_REPEATED)
            if not is_place and not is_named(f"{_VARIABLES}.{name}", about):
                values = [[each.get(name, "unset") for each in side] for side in variables]
                reasons += _differing(f"environment variable {name}", f"{_VARIABLES}.{name}", *values)
    for side, runs in (("A", a), ("B", b)):
        reasons += [f"runs of {side} are not repeats of one thing: {line}" for line in mixture(runs)]
        reasons += failed_guards(side, runs)
    return reasons + (_not_asked(a[0].record, b[0].record, about) if about else [])


def mixture(runs: Sequence[Run]) -> list[str]:
    """Why runs are not repeats of one thing, a line each: they differ in code, versions, GPU or flags, or in the host
    where that is part of what was measured."""
    names = (*CHOSEN, *MUST_MATCH, *(HOST_MUST_MATCH if host_reason(runs) else ()))
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in values_at(run.record, *names).items():
            values.setdefault(name, set()).add(as_text(value))
    return [f"{name} is {_listed(texts)}" for name, texts in values.items() if len(texts) > 1]


def host_reason(runs: Iterable[Run]) -> str | None:
    """Why the host is part of what was measured, None where the device had work queued in every phase."""
    for run in runs:
        if run.record.device_type != "cuda":
            return "on a CPU the host is what was measured"
        verdicts = dict(run.record.probe.verdicts.items()) if run.record.probe.verdicts else {}
        if not verdicts:
            return f"no probe step of {run.run_id} looked whether the device waits for the host"
        for phase, lag in verdicts.items():
            if lag.verdict != "queued":
                return f"{phase} of {run.run_id} is {lag.verdict}: the host is part of what was measured"
    return None


def busy_reason(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    """Why a difference may be one of the machine's load, None where it may not: most runs of a side had to share the
    machine, and the host is part of what was measured."""
    for side, runs in (("A", a), ("B", b)) if host_reason([*a, *b]) else ():
        guards = [guard for run in runs for guard in run.record.guards]
        messages = [guard.message for guard in guards if guard.name == BUSY_MACHINE and guard.status == "warn"]
        if 2 * len(messages) > len(runs):
            signs = messages[0].partition(": ")[2]
            advice = "measure again when it is quiet, or both sides in turn (lmbench compare --run)"
            return f"busy machine in {len(messages)} of {len(runs)} runs of {side} ({signs}): {advice}"
    return None


def _differing(title: str, name: str, a: Iterable[object], b: Iterable[object]) -> list[str]:
    texts_a, texts_b = ({as_text(value) for value in side} for side in (a, b))
    if not texts_a or not texts_b or texts_a == texts_b:
        return []
    hint = f"--about {name.removeprefix('environment.')}, if that is what you compare"
    return [f"{title} differs: A {_listed(texts_a)}, B {_listed(texts_b)} ({hint})"]


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


def _listed(texts: Iterable[str]) -> str:
    return " or ".join(brief(text) for text in sorted(texts))
