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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lmbench.files import Unreadable
from lmbench.records.load import Run, read_steps
from lmbench.records.store import STEPS_FILE

#: Steps of a run that are looked at; a file of them is a tenth of a gigabyte.
MAX_STEPS = 100_000
#: A figure beyond this has run away as much as an infinite one, and sums of it stay finite.
_MOST = 1e100
#: Shares of the steps: the tail, over which losses and norms are averaged; the steps up to each step that its smoothed
#: loss is the mean of; and where in its run the baseline has the loss that others are to reach.
TAIL_FRACTION, SMOOTHED_FRACTION, TARGET_FRACTION = 0.25, 0.1, 0.75
#: Seeds of the baseline below which their spread is not known well enough, and steps below which a tail says nothing.
MIN_SEEDS, MIN_STEPS = 3, 20
CONFIDENCE = 0.95

#: Of each seed of weights and data, the curve of its run.
Curves = Mapping[Any, "Curve"]


def share(count: int, fraction: float) -> int:
    """So many of the steps, one at least."""
    return max(1, round(count * fraction))


@dataclass(frozen=True, eq=False)
class Curve:
    """Loss and gradient norm by step, from the first of the warm-up on; nan where a step has none.

    `skipped` says of each step whether the scaler skipped its update. All three are arrays of one length.
    """

    losses: np.ndarray[Any, Any]
    norms: np.ndarray[Any, Any]
    skipped: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.losses)

    def first(self, count: int) -> Curve:
        """Its first steps."""
        return Curve(self.losses[:count], self.norms[:count], self.skipped[:count])

    @property
    def broke_at(self) -> int | None:
        """The first step whose loss is not finite though the scaler did not skip it; None where none is so."""
        broken = np.flatnonzero(~np.isfinite(self.losses) & ~self.skipped)
        return int(broken[0]) if len(broken) else None

    @property
    def tail_loss(self) -> float:
        """Mean loss of the tail's updates; nan if one of its losses is, or nothing was updated."""
        losses = self.losses[self._tail()]
        return float(losses.mean()) if len(losses) else math.nan

    @property
    def tail_log_norm(self) -> float:
        """Mean logarithm of the gradient norm of the tail's updates; nan without norms, minus infinite where there was
        no gradient."""
        norms = self.norms[self._tail()]
        with np.errstate(divide="ignore"):
            logs = np.log(norms[~np.isnan(norms)])
        return float(logs.mean()) if len(logs) else math.nan

    def _tail(self) -> np.ndarray[Any, Any]:
        is_late = np.arange(len(self)) >= len(self) - share(len(self), TAIL_FRACTION)
        return np.flatnonzero(is_late & ~self.skipped)

    def smoothed(self, width: int) -> np.ndarray[Any, Any]:
        """The mean of each loss and those before it, `width` in all, without skipped steps; nan before there are as
        many, and where one of them is not finite."""
        is_bad = ~np.isfinite(self.losses) & ~self.skipped
        kept = pd.Series(np.where(is_bad | self.skipped, np.nan, self.losses)).rolling(width, min_periods=1).mean()
        return np.asarray(kept.where(pd.Series(is_bad, dtype=float).rolling(width).sum() == 0))


def curve_of(run: Run) -> Curve | None:
    """A run's curve, read from its folder; None where it has no step with a loss."""
    path = run.path / STEPS_FILE
    try:
        state = path.stat()
    except OSError:
        return None
    curve = _read(path, state.st_mtime_ns, state.st_size)
    return curve if curve.broke_at is not None or not np.isnan(curve.losses).all() else None


@lru_cache(maxsize=512)
def _read(path: Path, _changed_ns: int, _size_bytes: int) -> Curve:
    rows: list[tuple[float, float, bool]] = []
    try:
        for _, step in islice(read_steps(path), MAX_STEPS):
            if step is None:
                break
            rows.append((_figure(step.loss), _figure(step.gradient_norm), bool(step.is_skipped)))
    except Unreadable:
        # The steps before the tear are whole.
        pass
    losses, norms, skipped = zip(*rows, strict=True) if rows else ((), (), ())
    return Curve(np.array(losses, dtype=float), np.array(norms, dtype=float), np.array(skipped, dtype=bool))


def _figure(value: float | None) -> float:
    if value is None:
        return math.nan
    return value if abs(value) <= _MOST else math.inf if value > 0 else -math.inf


def steps_to_loss(curve: Curve, baseline: Curve) -> float:
    """Steps until a curve's smoothed loss crosses the target; infinite if it never does, or there is none.

    The target is the baseline's smoothed loss after three quarters of its steps. Both are smoothed alike, so that they
    are late alike; between two steps the crossing lies on a straight line.
    """
    width = share(len(baseline), SMOOTHED_FRACTION)
    target = baseline.smoothed(width)[share(len(baseline), TARGET_FRACTION) - 1]
    values = curve.smoothed(width)
    below = np.flatnonzero(values <= target)
    if not len(below):
        return math.inf
    place = int(below[0])
    before = values[place - 1] if place else math.nan
    return place + 1 - float((target - values[place]) / (before - values[place]) if before > target else 0.0)


@dataclass(frozen=True)
class Difference:
    """How far a row's figure lies from the baseline's of the same seed: a loss in nat, or the logarithm of a norm.

    `apart` is how far the lowest and the highest of the baseline's seeds lie from each other, `limit` how far two runs
    may; both None if nobody knows.
    """

    name: str
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

    @property
    def why(self) -> str:
        """The figure beside its limit."""
        if not math.isfinite(self.value):
            return {
                "loss": "none of the last steps was an update",
                "gradient norm": "the gradient norm is not finite" if self.value > 0 else "there is no gradient",
            }[self.name]
        texts = [self._text(value or 0.0) for value in (self.value, self.apart, self.limit)]
        if self.name == "loss":
            texts[0] = f"{self._text(abs(self.value))} nat {'above' if self.value > 0 else 'below'}"
        apart = "" if self.is_beyond else f"seeds lie {texts[1]} apart, "
        return f"{self.name} {texts[0]}, {apart}limit {texts[2]}"

    def _text(self, value: float) -> str:
        return f"{value:.3g}" if self.name == "loss" else f"x{ratio(value):.3g}"


def ratio(logarithm: float) -> float:
    """The number that the logarithm is of; the largest number there is for what is larger."""
    return math.exp(min(logarithm, 709.0))


@dataclass(frozen=True)
class Judgement:
    """What is to be said of a row, by its loss and its gradient norm against the baseline's.

    `seeds` are those of the baseline. `broke_at` is the first step with a loss that is not finite. `reason` says why
    nothing can be said.
    """

    differences: tuple[Difference, ...] = ()
    seeds: int = 0
    broke_at: int | None = None
    reason: str = ""

    @property
    def _far(self) -> list[Difference]:
        """What lies beyond its limit, else further off than the seeds."""
        beyond = [each for each in self.differences if each.is_beyond]
        return beyond or [each for each in self.differences if each.is_outside]

    @property
    def follows(self) -> bool | None:
        """Whether it trains like the baseline; None where that cannot be told."""
        if self.broke_at is not None or any(each.is_beyond for each in self.differences):
            return False
        return None if self.reason or self._far or not self.differences else True

    @property
    def words(self) -> str:
        """The same in few words: `yes`, `NO: loss`, `undecided: gradient norm`."""
        if self.broke_at is not None:
            return f"NO: not finite from step {self.broke_at}"
        names = ", ".join(each.name for each in self._far)
        if self.follows is False:
            return f"NO: {names}"
        return f"not judged: {self.reason}" if self.reason else f"undecided: {names}" if names else "yes"

    @property
    def why(self) -> str:
        """With figures: what lies beyond its limit, or further off than the seeds; empty where nothing does."""
        if self.broke_at is not None:
            return f"the loss is not finite from step {self.broke_at} on"
        return "; ".join(each.why for each in self._far) or self.reason


def judge(curves: Curves, baseline: Curves) -> Judgement:
    """The judgement on the runs of a row, one of each seed, against those of the baseline."""
    seeds = len(baseline)
    broken = [place for curve in curves.values() if (place := curve.broke_at) is not None]
    if broken:
        return Judgement(broke_at=min(broken), seeds=seeds)
    shared = [seed for seed in curves if seed in baseline]
    if not shared:
        runs = "no run of the baseline has its seed and data" if baseline else "the baseline has no run that ended well"
        return Judgement(seeds=seeds, reason=runs)
    steps = min(len(curve) for curve in (*baseline.values(), *(curves[seed] for seed in shared)))
    if steps < MIN_STEPS:
        return Judgement(seeds=seeds, reason=f"{steps} steps, of which {MIN_STEPS} are needed")
    tails, own = _tails(baseline, steps), _tails({seed: curves[seed] for seed in shared}, steps)
    losses, reason = tails["loss"], ""
    if not np.isfinite(losses).all():
        reason = "the baseline's own loss is not finite"
    elif seeds < MIN_SEEDS:
        reason = f"the baseline has {seeds} of the {MIN_SEEDS} seeds that tell its spread"
    elif losses.nunique() == 1:
        reason = "the baseline's seeds make no difference"
    differences = []
    for name in tails:
        # A loss that is nan is a difference beyond every limit; a norm that is nan was not recorded.
        values = tails[name] if name == "loss" else tails[name].dropna()
        changes = (own[name] - values).reindex(own.index)
        changes = changes if name == "loss" else changes.dropna()
        if len(changes):
            limit = limit_of(values.to_numpy(), len(changes))
            apart = None if limit is None else float(np.ptp(values)) / math.sqrt(len(changes))
            differences.append(Difference(name, float(changes.mean(skipna=False)), apart, limit))
    return Judgement(tuple(differences), seeds, reason=reason)


def _tails(curves: Curves, steps: int) -> pd.DataFrame:
    """Loss and logarithm of the gradient norm over the tail of the first steps, a row for each seed."""
    cut = [curve.first(steps) for curve in curves.values()]
    rows = [(curve.tail_loss, curve.tail_log_norm) for curve in cut]
    return pd.DataFrame(rows, pd.Index(list(curves), tupleize_cols=False), ["loss", "gradient norm"], dtype=float)


def limit_of(values: np.ndarray[Any, Any], pairs: int) -> float | None:
    """How far the mean of so many differences may be from none, by a figure of each of the baseline's seeds."""
    if len(values) < MIN_SEEDS or len(set(values)) == 1 or not np.isfinite(values).all():
        return None
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    quantile = float(stdtrit(len(values) - 1, 0.5 + CONFIDENCE / 2))
    return quantile * float(values.std(ddof=1)) * math.sqrt(2 / pairs)
