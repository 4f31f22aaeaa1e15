"""What a reader of a comparison should know and no rule decides."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence

from lmbench.compare.comparability import host_reason
from lmbench.compare.metrics import METRICS, STEP
from lmbench.records.environment import Host
from lmbench.records.load import Run
from lmbench.records.settings import Difference
from lmbench.records.statistics import geometric_mean

#: Host scores repeat within this on one machine.
_SCORE_LIMIT_FRACTION = 0.10
_SCORES: tuple[tuple[Callable[[Host], float | None], str], ...] = (
    (lambda host: host.python_iteration_s, "a pure-Python loop"),
    (lambda host: host.kernel_launch_s, "issuing a kernel"),
)


def notes(a: Sequence[Run], b: Sequence[Run], found: Sequence[Difference]) -> list[str]:
    """Lines on runs of one cell that can be compared or not; `found` are the differences between them."""
    lines = [_tokens(a, b), _machine(a, b), _order(a, b), _dirty("A", a), _dirty("B", b), *_scores(a, b)]
    lines += [_one_sided("A", a, b), _one_sided("B", b, a), _confounded(found), _warnings(a, b)]
    return [line for line in lines if line is not None]


def _tokens(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    """Steps of another size: their times say nothing of speed until divided by their tokens."""
    windows = [side[0].record.window for side in (a, b)]
    tokens = [window.tokens / window.steps for window in windows if window.tokens and window.steps]
    if len(tokens) < 2 or tokens[0] == tokens[1]:
        return None
    mine, theirs = (
        geometric_mean([s for run in side if (s := STEP.of(run.record)) is not None]) / each
        for side, each in zip((a, b), tokens, strict=True)
    )
    return (
        f"a step has {tokens[0]:,.0f} tokens in A, {tokens[1]:,.0f} in B: the time per token of B is "
        f"{theirs / mine:.4g} times A's"
    )


def _one_sided(side: str, runs: Sequence[Run], others: Sequence[Run]) -> str | None:
    """Figures that cannot be compared: a phase that the other side's mode does not have, say."""
    names = [
        metric.title
        for metric in METRICS
        if all(metric.of(run.record) is not None for run in runs)
        and any(metric.of(run.record) is None for run in others)
    ]
    return f"not every run of the other side has {', '.join(names)}, as those of {side} do" if names else None


def _machine(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    cards = [{run.record.environment.gpu.uuid for run in side if run.record.environment} - {None} for side in (a, b)]
    if not all(cards) or cards[0] == cards[1]:
        return None
    bound = " (every phase had work queued)" if host_reason([*a, *b]) is None else ""
    return f"A and B ran on different cards of the same SKU{bound}"


def _order(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    """Repeats that are not interleaved have the machine's drift in their ratio."""
    mine, theirs = (sorted(run.record.started_at or "" for run in side) for side in (a, b))
    if len(a) + len(b) < 3 or (mine[0] <= theirs[-1] and theirs[0] <= mine[-1]):
        return None
    first = "A" if mine[-1] < theirs[0] else "B"
    return f"all runs of {first} came before the others: what the machine drifted meanwhile is in the ratio"


def _dirty(side: str, runs: Sequence[Run]) -> str | None:
    codes = [run.record.environment.code for run in runs if run.record.environment]
    changed = {"project": any(c.project.is_dirty for c in codes), "lmbench": any(c.lmbench.is_dirty for c in codes)}
    parts = [name for name, is_dirty in changed.items() if is_dirty]
    if not parts:
        return None
    return f"code of {side} differs from its commit ({', '.join(parts)}): the commit does not tell what ran"


def _scores(a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    """The host's own speed at both times, where it matters."""
    if host_reason([*a, *b]) is None:
        return []
    hosts = [[run.record.environment.host for run in side if run.record.environment] for side in (a, b)]
    lines = []
    for score, what in _SCORES:
        known = [[value for host in side if (value := score(host))] for side in hosts]
        if all(known):
            ratio = statistics.median(known[1]) / statistics.median(known[0])
            if abs(ratio - 1) > _SCORE_LIMIT_FRACTION:
                lines.append(f"the host took {ratio:.2f} times as long in B as in A for {what}")
    return lines


def _confounded(found: Sequence[Difference]) -> str | None:
    kinds = {_kind(difference.name) for difference in found if None not in (difference.a, difference.b)} - {""}
    if kinds & {"code", "versions"}:
        # An environment is how those were chosen.
        kinds.discard("sweep.environment")
    if len(kinds) < 2:
        return None
    return f"{len(kinds)} things differ at once ({', '.join(sorted(kinds))}): the ratio does not tell which one counts"


def _kind(name: str) -> str:
    """What a difference is one of: a setting by its own name, the code, the versions; "" for what only follows."""
    for part in ("environment.code", "environment.versions"):
        if name.startswith(part):
            return part.removeprefix("environment.")
    if name in ("flops.per_token_flops", "model.parameter_count", "model.context_length"):
        return ""
    return name


def _warnings(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    mine, theirs = (
        Counter(guard.name for run in side for guard in run.record.guards if guard.status == "warn") for side in (a, b)
    )
    listed = [f"{name} ({mine[name]} of {len(a)}, {theirs[name]} of {len(b)})" for name in sorted({*mine, *theirs})]
    return f"guards that warned (runs of A, of B): {', '.join(listed)}" if listed else None
