"""What a reader of a comparison should know and no rule decides."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from lmbench.compare.comparability import Difference, host_reason
from lmbench.compare.metrics import METRICS, STEP
from lmbench.records.load import Run
from lmbench.records.paths import lookup, number
from lmbench.records.welch import geometric_mean

#: Host scores repeat within this on one machine.
_SCORE_LIMIT_FRACTION = 0.10
_SCORES = {"python_iteration_s": "a pure-Python loop", "kernel_launch_s": "issuing a kernel"}


def notes(a: Sequence[Run], b: Sequence[Run], found: Sequence[Difference]) -> list[str]:
    """Lines on runs of one cell that can be compared or not; `found` are the differences between them."""
    lines = [_tokens(a, b), _machine(a, b), _order(a, b), _dirty("A", a), _dirty("B", b), *_scores(a, b)]
    lines += [_one_sided("A", a, b), _one_sided("B", b, a), _confounded(found), _warnings(a, b)]
    return [line for line in lines if line is not None]


def _tokens(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    """Steps of another size: their times say nothing of speed until divided by their tokens."""
    mine, theirs = _tokens_of_a_step(a), _tokens_of_a_step(b)
    if mine is None or theirs is None or mine == theirs:
        return None
    steps = [geometric_mean([s for run in side if (s := STEP.of(run.run)) is not None]) for side in (a, b)]
    per_token = (steps[1] / theirs) / (steps[0] / mine)
    return (
        f"a step has {mine:,.0f} tokens in A, {theirs:,.0f} in B: the time per token of B is {per_token:.4g} times A's"
    )


def _tokens_of_a_step(runs: Sequence[Run]) -> float | None:
    tokens, steps = number(runs[0].run, "window.tokens"), number(runs[0].run, "window.steps")
    return tokens / steps if tokens and steps else None


def _one_sided(side: str, runs: Sequence[Run], others: Sequence[Run]) -> str | None:
    """Figures that cannot be compared: a phase that the other side's mode does not have, say."""
    names = [
        metric.title
        for metric in METRICS
        if all(metric.of(run.run) is not None for run in runs) and any(metric.of(run.run) is None for run in others)
    ]
    return f"not every run of the other side has {', '.join(names)}, as those of {side} do" if names else None


def _machine(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    cards = [{uuid for run in side if (uuid := lookup(run.run, "environment.gpu.uuid"))} for side in (a, b)]
    if not all(cards) or cards[0] == cards[1]:
        return None
    bound = " (every phase had work queued)" if host_reason([*a, *b]) is None else ""
    return f"A and B ran on different cards of the same SKU{bound}"


def _order(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    """Repeats that are not interleaved have the machine's drift in their ratio."""
    spans = [sorted(str(run.run.get("started_at")) for run in side) for side in (a, b)]
    if len(a) + len(b) < 3 or (spans[0][0] <= spans[1][-1] and spans[1][0] <= spans[0][-1]):
        return None
    first = "A" if spans[0][-1] < spans[1][0] else "B"
    return f"all runs of {first} came before the others: what the machine drifted meanwhile is in the ratio"


def _dirty(side: str, runs: Sequence[Run]) -> str | None:
    parts = [p for p in ("project", "lmbench") if any(lookup(r.run, f"environment.code.{p}.is_dirty") for r in runs)]
    if not parts:
        return None
    return f"code of {side} differs from its commit ({', '.join(parts)}): the commit does not tell what ran"


def _scores(a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    """The host's own speed at both times, where it matters."""
    if host_reason([*a, *b]) is None:
        return []
    lines = []
    for name, what in _SCORES.items():
        mine, theirs = (_median(side, f"environment.host.{name}") for side in (a, b))
        if mine and theirs and abs(theirs / mine - 1) > _SCORE_LIMIT_FRACTION:
            lines.append(f"the host took {theirs / mine:.2f} times as long in B as in A for {what}")
    return lines


def _median(runs: Sequence[Run], path: str) -> float | None:
    values = [value for run in runs if (value := number(run.run, path)) is not None]
    return statistics.median(values) if values else None


def _confounded(found: Sequence[Difference]) -> str | None:
    kinds = {_kind(difference.name) for difference in found if None not in (difference.a, difference.b)} - {""}
    if len(kinds) < 2:
        return None
    return f"{len(kinds)} things differ at once ({', '.join(sorted(kinds))}): the ratio does not tell which one counts"


def _kind(name: str) -> str:
    """What a difference is one of: a setting by its own name, the code, the versions; "" for what only follows."""
    for part in ("environment.code", "environment.versions"):
        if name.startswith(part):
            return part.removeprefix("environment.")
    if name in ("flops.per_token_flops", "model.parameter_count") or name == "model.context_length":
        return ""
    return name


def _warnings(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    counts = [
        Counter(g["name"] for run in side for g in run.run.get("guards") or () if g.get("status") == "warn")
        for side in (a, b)
    ]
    names = sorted(set(counts[0]) | set(counts[1]))
    if not names:
        return None
    listed = [f"{name} ({counts[0][name]} of {len(a)}, {counts[1][name]} of {len(b)})" for name in names]
    return f"guards that warned (runs of A, of B): {', '.join(listed)}"
