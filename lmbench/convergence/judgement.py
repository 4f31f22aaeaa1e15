"""Whether a run follows the baseline that began alike, by the spread between the baseline's own seeds.

Two figures of each run: the mean loss over the tail (the last quarter of the steps), and the mean logarithm of the
gradient norm there. A row's difference is taken between runs of one seed and data, and averaged over its m seeds. Its
limit is t s sqrt(2 / m): s the standard deviation of that figure between n seeds of the baseline, t Student's quantile
for n - 1 degrees of freedom and 95 %. So far two runs lie apart that have nothing in common but their configuration
(the prediction interval of a difference); beyond it, the row is no such run. Below it but further off than the lowest
and the highest seed lie apart, too few seeds tell.
A row has weights and batches in common with the baseline's run of its seed, so that with nothing changed but rounding
it stays closer than two seeds. How often each verdict falls (`python tests/experiments/simulated_convergence.py`, 10
000 rows of one seed; a row shares so much of the variance between seeds with its own seed):

    seeds  shared  higher by          yes   undecided      NO
        3  nothing          0      50.4 %      42.7 %   6.9 %
        3  half             0      76.6 %      20.7 %   2.7 %
        5  nothing          0      74.7 %      19.1 %   6.2 %
        5  half             0      94.3 %       4.5 %   1.2 %
        5  9 / 10     5 std         0.5 %      17.4 %  82.1 %
        8  nothing          0      88.6 %       5.0 %   6.4 %
        8  9 / 10     5 std         1.0 %       2.6 %  96.4 %

24 real trainings of a tiny model on text (300 steps, `--train 24`): between seeds 0.014 nat and 0.7 % of the gradient
norm; from weights that differ in the last bit 1e-7 nat, bf16-mixed 7e-5 nat, both `yes` in every draw of 3, 5 and 8
seeds; bf16-true 0.13 nat above, `NO` in every draw. 8 of them with a learning rate ten times as high: between seeds
0.008 nat, last bit 7e-6, bf16-mixed 0.004 and bf16-true 0.008 nat about no difference: what a low precision breaks
depends on the recipe.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmbench.convergence.curve import Curve, curve_of
from lmbench.records.statistics import sample_std
from lmbench.report.cells import Cell
from lmbench.report.gather import Sample

#: Seeds of the baseline below which their spread is not known well enough to judge by.
MIN_SEEDS = 3
#: Steps below which a tail says nothing.
MIN_STEPS = 20
CONFIDENCE = 0.95
_MOST_DIGITS = 6

#: A seed of weights and one of data, with the data's kind.
Seeds = tuple[Any, ...]


@dataclass(frozen=True)
class Difference:
    """How far a row's figure lies from the baseline's of the same seed.

    `apart` is how far the lowest and the highest of the baseline's seeds lie from each other, `limit` how far two runs
    may; both None if nobody knows.
    """

    value: float
    apart: float | None
    limit: float | None

    @property
    def is_beyond(self) -> bool:
        # A nan is beyond every limit.
        return self.limit is not None and not abs(self.value) <= self.limit

    @property
    def is_outside(self) -> bool:
        """Within the limit, but further than any two of the seeds."""
        return self.apart is not None and not self.is_beyond and abs(self.value) > self.apart


@dataclass(frozen=True)
class Judgement:
    """What is to be said of a row: its loss in nat and its gradient norm (as a logarithm) against the baseline's.

    `seeds` are those of the baseline. `broke_at` is the first step with a loss that is not finite. `reason` says why
    nothing can be said.
    """

    loss: Difference | None = None
    norm: Difference | None = None
    seeds: int = 0
    broke_at: int | None = None
    reason: str = ""

    @property
    def follows(self) -> bool | None:
        """Whether it trains like the baseline; None where that cannot be told."""
        if self.broke_at is not None or any(found.is_beyond for _, found in self._known()):
            return False
        is_open = any(found.is_outside for _, found in self._known())
        return None if self.reason or is_open or not self._known() else True

    @property
    def words(self) -> str:
        """The same in few words: `yes`, `NO: loss`, `undecided: gradient norm`."""
        if self.broke_at is not None:
            return f"NO: not finite from step {self.broke_at}"
        if self.follows is False:
            return f"NO: {', '.join(name for name, found in self._known() if found.is_beyond)}"
        if self.reason:
            return f"not judged: {self.reason}"
        names = [name for name, found in self._known() if found.is_outside]
        return f"undecided: {', '.join(names)}" if names else "yes"

    @property
    def why(self) -> str:
        """With figures: what lies beyond its limit, or further off than the seeds; empty where nothing does."""
        if self.broke_at is not None:
            return f"the loss is not finite from step {self.broke_at} on"
        told = {"loss": _loss_words, "gradient norm": _norm_words}
        far = [(name, found) for name, found in self._known() if found.is_beyond]
        far = far or [(name, found) for name, found in self._known() if found.is_outside]
        return "; ".join(told[name](found) for name, found in far) or self.reason

    def _known(self) -> list[tuple[str, Difference]]:
        both = (("loss", self.loss), ("gradient norm", self.norm))
        return [(name, found) for name, found in both if found is not None]


def _loss_words(found: Difference) -> str:
    if not math.isfinite(found.value):
        return "none of the last steps was an update"
    where = "above" if found.value > 0 else "below"
    off, limit = abs(found.value), found.limit or 0.0
    # As many digits as tell it from its limit.
    digits = next((n for n in range(2, _MOST_DIGITS) if f"{off:.{n}g}" != f"{limit:.{n}g}"), _MOST_DIGITS)
    return f"loss {off:.{digits}g} nat {where}, {_bounds(found, lambda value: f'{value:.{digits}g}')}"


def _norm_words(found: Difference) -> str:
    if not math.isfinite(found.value):
        return "the gradient norm is not finite" if found.value > 0 else "there is no gradient"
    return f"gradient norm {_times(found.value)}, {_bounds(found, _times)}"


def _bounds(found: Difference, text: Callable[[float], str]) -> str:
    limit = f"limit {text(found.limit or 0.0)}"
    return limit if found.is_beyond else f"seeds lie {text(found.apart or 0.0)} apart, {limit}"


def _times(logarithm: float) -> str:
    return f"x{ratio(logarithm):.3g}"


def ratio(logarithm: float) -> float:
    """What the logarithm is of; the largest number there is for what is larger."""
    return math.exp(min(logarithm, 709.0))


def pairs_of(cell: Cell, baseline: Cell) -> list[tuple[Curve, Curve]]:
    """Curves of runs with those of the baseline that began alike, one of each seed, cut to their common steps."""
    own, other = by_seed(cell.ok), by_seed(baseline.ok)
    found = [(curve, other[seeds]) for seeds, curve in own.items() if seeds in other]
    return [(mine.first(len(theirs)), theirs.first(len(mine))) for mine, theirs in found]


def by_seed(samples: Sequence[Sample]) -> dict[Seeds, Curve]:
    """The curve of the first run of each seed."""
    found: dict[Seeds, Curve] = {}
    for sample in samples:
        seeds = (*sample.seeds, sample.record.data.source)
        if sample.seeds[0] is not None and seeds not in found and (curve := curve_of(sample)) is not None:
            found[seeds] = curve
    return found


def judge(cell: Cell, baseline: Cell | None) -> Judgement | None:
    """Whether a cell follows its baseline; None of a cell that has no loss to tell it by, and of the baseline."""
    if baseline is None or baseline is cell or not any(True for s in cell.ok if curve_of(s) is not None):
        return None
    return judged(by_seed(cell.ok), by_seed(baseline.ok))


def judged(own: Mapping[Seeds, Curve], baseline: Mapping[Seeds, Curve]) -> Judgement:
    """The judgement on runs, one of each seed, against those of the baseline."""
    broken = [place for curve in own.values() if (place := curve.broke_at) is not None]
    if broken:
        return Judgement(broke_at=min(broken), seeds=len(baseline))
    if not baseline:
        return Judgement(reason="the baseline has no run that ended well")
    shared = [seeds for seeds in own if seeds in baseline]
    if not shared:
        return Judgement(seeds=len(baseline), reason="no run of the baseline has its seed and data")
    steps = min(len(curve) for curve in (*baseline.values(), *(own[seeds] for seeds in shared)))
    if steps < MIN_STEPS:
        return Judgement(seeds=len(baseline), reason=f"{steps} steps, of which {MIN_STEPS} are needed")
    mine = {seeds: own[seeds].first(steps) for seeds in shared}
    theirs = {seeds: curve.first(steps) for seeds, curve in baseline.items()}
    losses = {seeds: curve.tail_loss for seeds, curve in theirs.items()}
    norms = {seeds: norm for seeds, curve in theirs.items() if (norm := curve.tail_log_norm) is not None}
    own_norms = {seeds: norm for seeds, curve in mine.items() if (norm := curve.tail_log_norm) is not None}
    reason = ""
    if not all(map(math.isfinite, losses.values())):
        reason = "the baseline's own loss is not finite"
    elif len(losses) < MIN_SEEDS:
        reason = f"the baseline has {len(losses)} of the {MIN_SEEDS} seeds that tell its spread"
    elif len(set(losses.values())) == 1:
        reason = "the baseline's seeds make no difference"
    return Judgement(
        loss=_difference({seeds: curve.tail_loss for seeds, curve in mine.items()}, losses),
        norm=_difference(own_norms, norms),
        seeds=len(baseline),
        reason=reason,
    )


def _difference(own: Mapping[Seeds, float], baseline: Mapping[Seeds, float]) -> Difference | None:
    """The mean difference over the seeds in common, and its limit by the spread between all of the baseline's."""
    differences = [value - baseline[seeds] for seeds, value in own.items() if seeds in baseline]
    if not differences:
        return None
    values, pairs = list(baseline.values()), len(differences)
    limit = limit_of(values, pairs)
    apart = None if limit is None else (max(values) - min(values)) / math.sqrt(pairs)
    return Difference(statistics.fmean(differences), apart, limit)


def limit_of(values: Sequence[float], pairs: int) -> float | None:
    """How far the mean of so many differences may be from none, by a figure of each of the baseline's seeds."""
    if len(values) < MIN_SEEDS or len(set(values)) == 1 or not all(map(math.isfinite, values)):
        return None
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    spread = sample_std(values, statistics.fmean(values)) or 0.0
    return float(stdtrit(len(values) - 1, 0.5 + CONFIDENCE / 2)) * spread * math.sqrt(2 / pairs)
