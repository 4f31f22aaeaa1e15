"""What a reader of a comparison should know and no rule decides."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from lmbench.compare.comparability import host_reason
from lmbench.compare.metrics import METRICS, STEP
from lmbench.records.load import Run
from lmbench.records.schema import value_at
from lmbench.records.settings import Difference
from lmbench.records.statistics import geometric_mean

#: Host scores repeat within this on one machine.
_SCORE_LIMIT_FRACTION = 0.10
_SCORES = {"python_iteration_s": "a pure-Python loop", "kernel_launch_s": "issuing a kernel"}


def notes(a: Sequence[Run], b: Sequence[Run], differences: Sequence[Difference]) -> list[str]:
    """Lines on runs of one cell that can be compared or not, which differ so."""
    return [*_machine(a, b), *_code(a, b), *_figures(a, b), *_confounded(differences), *_warnings(a, b)]


def _machine(a: Sequence[Run], b: Sequence[Run]) -> Iterator[str]:
    """Steps of another size, another card, drift and the host's own speed."""
    windows = [side[0].record.window for side in (a, b)]
    tokens = [window.tokens / window.steps for window in windows if window.tokens and window.steps]
    if len(tokens) == 2 and tokens[0] != tokens[1]:
        steps = [[value for run in side if (value := STEP.of(run.record)) is not None] for side in (a, b)]
        times = [geometric_mean(values) / count for values, count in zip(steps, tokens, strict=True)]
        counts = f"a step has {tokens[0]:,.0f} tokens in A, {tokens[1]:,.0f} in B"
        yield f"{counts}: the time per token of B is {times[1] / times[0]:.4g} times A's"
    host = host_reason([*a, *b])
    cards = [_known(side, "environment.gpu.uuid") for side in (a, b)]
    if all(cards) and set(cards[0]) != set(cards[1]):
        yield "A and B ran on different cards of the same SKU" + ("" if host else " (every phase had work queued)")
    starts_a, starts_b = (sorted(run.record.started_at or "" for run in side) for side in (a, b))
    if len(a) + len(b) > 2 and (starts_a[-1] < starts_b[0] or starts_b[-1] < starts_a[0]):
        first = "A" if starts_a[-1] < starts_b[0] else "B"
        yield f"all runs of {first} came before the others: what the machine drifted meanwhile is in the ratio"
    for name, work in _SCORES.items() if host else ():
        scores = [_known(side, f"environment.host.{name}") for side in (a, b)]
        if all(scores):
            ratio = statistics.median(scores[1]) / statistics.median(scores[0])
            if abs(ratio - 1) > _SCORE_LIMIT_FRACTION:
                yield f"the host took {ratio:.2f} times as long in B as in A for {work}"


def _known(runs: Sequence[Run], name: str) -> list[float]:
    return [value for run in runs if (value := value_at(run.record, name)) is not None]


def _code(a: Sequence[Run], b: Sequence[Run]) -> Iterator[str]:
    for side, runs in (("A", a), ("B", b)):
        codes = ("project", "lmbench")
        if dirty := [name for name in codes if any(_known(runs, f"environment.code.{name}.is_dirty"))]:
            yield f"code of {side} differs from its commit ({', '.join(dirty)}): the commit does not tell what ran"


def _figures(a: Sequence[Run], b: Sequence[Run]) -> Iterator[str]:
    """Figures that cannot be compared: a phase that the other side's mode does not have, say."""
    for side, runs, others in (("A", a, b), ("B", b, a)):
        titles = [
            metric.title
            for metric in METRICS
            if all(metric.of(run.record) is not None for run in runs)
            and any(metric.of(run.record) is None for run in others)
        ]
        if titles:
            yield f"not every run of the other side has {', '.join(titles)}, as those of {side} do"


def _confounded(differences: Sequence[Difference]) -> Iterator[str]:
    """Several things that differ: settings by their own names, code, versions, but nothing that only follows."""
    names = {difference.name for difference in differences if None not in (difference.a, difference.b)}
    kinds = names - {"flops.per_token_flops", "model.parameter_count", "model.context_length"}
    for kind in ("code", "versions"):
        facts = {name for name in kinds if name.startswith(f"environment.{kind}")}
        if facts:
            # An environment is how those were chosen.
            kinds = kinds - facts - {"sweep.environment"} | {kind}
    if len(kinds) > 1:
        listed = ", ".join(sorted(kinds))
        yield f"{len(kinds)} things differ at once ({listed}): the ratio does not tell which one counts"


def _warnings(a: Sequence[Run], b: Sequence[Run]) -> Iterator[str]:
    counts_a, counts_b = (
        Counter(guard.name for run in side for guard in run.record.guards if guard.status == "warn") for side in (a, b)
    )
    names = sorted({*counts_a, *counts_b})
    if names:
        listed = [f"{name} ({counts_a[name]} of {len(a)}, {counts_b[name]} of {len(b)})" for name in names]
        yield f"guards that warned (runs of A, of B): {', '.join(listed)}"
