"""Are two groups of runs comparable? One table says what has to be the same and what chooses it; `notes` says what a
reader should know and no rule decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from lmbench.errors import UsageError, suggest
from lmbench.records.guard import BUSY_MACHINE
from lmbench.records.load import Run
from lmbench.records.schema import fields, value_at
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
from lmbench.records.statistics import Ratio

#: Recorded facts that have to be the same on both sides, by dotted name, with the settings that choose them: where one
#: of these differs too, the fact is the thing compared. A difference of any other fact is no choice of the user's, and
#: invalidates. A fact that is not recorded on a side differs from nothing.
MUST_MATCH: dict[str, tuple[str, ...]] = {
    "device_type": (),
    "environment.gpu.name": (),
    "environment.gpu.sku": (),
    "environment.gpu.is_mig": (),
    "environment.gpu.power_limit_w": (),
    "mode": ("measure.mode", "mode"),
    "precision": ("trainer.precision", "trainer.plugins"),
    "matmul_precision": ("measure.matmul_precision",),
    "clock": ("timer.clock",),
    "zero_grad": ("measure.zero_grad",),
    "gc_policy": (),
    "world_size": ("trainer.devices", "trainer.num_nodes", "trainer.strategy"),
    "window.micro_batches": ("trainer.accumulate_grad_batches", "data", "model"),
    "compile.is_enabled": ("trainer.compile",),
    "compile.mode": ("trainer.compile",),
    "compile.backend": ("trainer.compile",),
    "compile.fullgraph": ("trainer.compile",),
    "compile.dynamic": ("trainer.compile",),
    "compile.regional": ("trainer.compile",),
    "environment.flags.float32_matmul_precision": ("measure.matmul_precision",),
    "environment.flags.cuda_matmul_allow_tf32": ("measure.matmul_precision",),
    "environment.flags.cudnn_allow_tf32": (),
    "environment.flags.cudnn_benchmark": ("trainer.benchmark", "trainer.deterministic"),
    "environment.flags.cudnn_deterministic": ("trainer.deterministic",),
    "environment.flags.deterministic_algorithms": ("trainer.deterministic",),
    "environment.flags.anomaly_mode": ("trainer.detect_anomaly",),
    "environment.flags.allocator_backend": ("sweep.environment",),
}
#: Facts that have to be the same only where the host is part of what was measured (a CPU, or a lag near zero).
HOST_MUST_MATCH: dict[str, tuple[str, ...]] = {
    "environment.host.hostname": (),
    "environment.host.cpu_model": (),
    "environment.host.core_count": (),
    "environment.host.affinity": (),
    "environment.flags.thread_count": ("sweep.environment",),
}

#: Environment variables that name a place or repeat a setting; any other one that differs invalidates.
_PLACES = ("_DIR", "_HOME", "_PATH", "_FILE", "_VISIBLE_DEVICES", "_RUN_ID", "_CACHE")
_REPEATED = ("TORCHELASTIC_",)
_VARIABLES = "environment.variables"


def check_about(about: Iterable[str], runs: Sequence[Run]) -> None:
    """Raises UsageError for a name of `--about` that is nothing in these runs."""
    known = {*MUST_MATCH, *HOST_MUST_MATCH, *CHOSEN, _VARIABLES}
    known.update(*((*settings(run.record), *values_at(run.record, "environment")) for run in runs))
    for name in about:
        if not any(is_named(candidate, (name,)) for candidate in known):
            raise UsageError(f"--about {name}: these runs record nothing of that name{suggest(name, known)}")


def invalid_reasons(a: Sequence[Run], b: Sequence[Run], about: Sequence[str] = ()) -> list[str]:
    """Why runs of A and B are not comparable, a line each; none if they are.

    Args:
        about: names of what is compared. Without any, every setting may differ; with some, only these may.
    """
    changed = [difference.name for difference in setting_differences(a[0].record, b[0].record)]
    reasons = []
    for name, setters in _facts([*a, *b]).items():
        # A script of the user's own records no settings: what could be chosen was.
        is_chosen = any(is_named(setting, setters) for setting in changed) or (setters and a[0].record.config is None)
        if not is_chosen and not any(is_named(alias, about) for alias in (name, *setters)):
            known = [[value for run in side if (value := value_at(run.record, name)) is not None] for side in (a, b)]
            reasons += _differing(fields("run")[name].title, name, *known)
    variables = [[value_at(run.record, _VARIABLES) for run in side] for side in (a, b)]
    # Unlike other facts, a variable that is not there is known: it is unset.
    if "sweep.environment" not in changed and None not in variables[0] + variables[1]:
        for variable in sorted({name for side in variables for environment in side for name in environment}):
            name = f"{_VARIABLES}.{variable}"
            if not (variable.endswith(_PLACES) or variable.startswith(_REPEATED) or is_named(name, about)):
                values = [[environment.get(variable, "unset") for environment in side] for side in variables]
                reasons += _differing(f"environment variable {variable}", name, *values)
    for side, runs in (("A", a), ("B", b)):
        reasons += [f"runs of {side} are not repeats of one thing: {line}" for line in mixture(runs)]
        reasons += failed_guards(side, runs)
    # A setting that only one side knows is no difference of value.
    reasons += [
        f"{difference}; the comparison is about {', '.join(about)}"
        for difference in (chosen_differences(a[0].record, b[0].record) if about else ())
        if not is_named(difference.name, about)
        and (difference.name == "sweep.environment" or None not in (difference.a, difference.b))
    ]
    return reasons


def _facts(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    return MUST_MATCH | (HOST_MUST_MATCH if counts_host(runs) else {})


def mixture(runs: Sequence[Run]) -> list[str]:
    """Why runs are not repeats of one thing, a line each: they differ in code, versions, GPU or flags, or in the host
    where that is part of what was measured."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in values_at(run.record, *CHOSEN, *_facts(runs)).items():
            values.setdefault(name, set()).add(as_text(value))
    return [f"{name} is {_listed(texts)}" for name, texts in values.items() if len(texts) > 1]


def counts_host(runs: Sequence[Run]) -> bool:
    """Whether the host is part of what was measured, as it is on a CPU, and where not every phase had work queued."""
    probed = [run.record.probe.verdicts for run in runs if run.record.probe.verdicts]
    verdicts = {lag.verdict for lags in probed for _, lag in lags.items()}
    return verdicts != {"queued"} or any(run.record.device_type != "cuda" for run in runs)


def busy_reason(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    """Why a difference may be one of the machine's load, None where it may not: most runs of a side had to share the
    machine, and the host is part of what was measured."""
    for side, runs in (("A", a), ("B", b)) if counts_host([*a, *b]) else ():
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


def _listed(texts: Iterable[str]) -> str:
    return " or ".join(map(brief, sorted(texts)))


def failed_guards(side: str, runs: Sequence[Run]) -> list[str]:
    """Guards that failed in runs of a side, a line each."""
    failed: dict[str, list[str]] = {}
    for guard in (guard for run in runs for guard in run.record.guards if guard.status == "fail"):
        failed.setdefault(guard.name, []).append(guard.message)
    return [
        f"guard {name} failed in {len(messages)} of {len(runs)} runs of {side}: {messages[0]}"
        for name, messages in failed.items()
    ]


def earlier_side(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    """The side all of whose runs came before the other's, None where the sides took turns or nobody knows."""
    starts = sorted((run.record.started_at or "", side) for side, runs in (("A", a), ("B", b)) for run in runs)
    order = [side for start, side in starts if start]
    is_apart = len(order) > 2 and order in (sorted(order), sorted(order, reverse=True)) and {*order} == {"A", "B"}
    return order[0] if is_apart else None


def notes(a: Sequence[Run], b: Sequence[Run], step: Ratio) -> list[str]:
    """Lines on what differs between runs of one cell, `step` the ratio of their step times."""

    def known(name: str) -> list[list[Any]]:
        return [[value for run in side if (value := value_at(run.record, name)) is not None] for side in (a, b)]

    lines = []
    windows = [side[0].record.window for side in (a, b)]
    tokens = [window.tokens / window.steps for window in windows if window.tokens and window.steps]
    if len(set(tokens)) == 2:
        per_token = step.point * tokens[0] / tokens[1]
        counts = f"a step has {tokens[0]:,.0f} tokens in A, {tokens[1]:,.0f} in B"
        lines.append(f"{counts}: the time per token of B is {per_token:.4g} times A's")
    cards = known("environment.gpu.uuid")
    if all(cards) and {*cards[0]} != {*cards[1]}:
        lines.append("A and B ran on different cards of the same SKU")
    if (first := earlier_side(a, b)) is not None:
        lines.append(f"all runs of {first} came before the others: what the machine drifted is in the ratio")
    for code in ("project", "lmbench"):
        for side, is_dirty in zip("AB", known(f"environment.code.{code}.is_dirty"), strict=True):
            if any(is_dirty):
                lines.append(f"code of {side} differs from its commit ({code}): the commit does not tell what ran")
    warned = [Counter(g.name for run in runs for g in run.record.guards if g.status == "warn") for runs in (a, b)]
    listed = [
        f"{name} ({warned[0][name]} of {len(a)}, {warned[1][name]} of {len(b)})"
        for name in sorted({*warned[0], *warned[1]})
    ]
    if listed:
        lines.append(f"guards that warned (runs of A, of B): {', '.join(listed)}")
    return lines
