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

24 real trainings of a tiny model on text (300 steps): between seeds 0.014 nat and 0.7 % of the gradient
norm; from weights that differ in the last bit 1e-7 nat, bf16-mixed 7e-5 nat, both `yes` in every draw of 3, 5 and 8
seeds; bf16-true 0.13 nat above, `NO` in every draw. 8 of them with a learning rate ten times as high: between seeds
0.008 nat, last bit 7e-6, bf16-mixed 0.004 and bf16-true 0.008 nat about no difference: what a low precision breaks
depends on the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy  # type: ignore[import-untyped]

from lmbench.records.load import Run
from lmbench.records.store import STEPS_FILE
from lmbench.report.columns import first_steps

#: Steps of a run that are looked at; a file of them is a tenth of a gigabyte.
MAX_STEPS = 100_000
#: Shares of the steps: the tail, over which losses and norms are averaged; the steps up to each step that its smoothed
#: loss is the mean of; and where in its run the baseline has the loss that others are to reach.
TAIL_FRACTION, SMOOTHED_FRACTION, TARGET_FRACTION = 0.25, 0.1, 0.75
#: Seeds of the baseline below which their spread is not known well enough, and steps below which a tail says nothing.
MIN_SEEDS, MIN_STEPS = 3, 20
CONFIDENCE = 0.95

Array = np.ndarray[Any, Any]
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

    losses: Array
    norms: Array
    skipped: Array

    def __len__(self) -> int:
        return len(self.losses)

    def first(self, count: int) -> Curve:
        """Its first steps."""
        return Curve(self.losses[:count], self.norms[:count], self.skipped[:count])

    @property
    def _is_bad(self) -> Array:
        return ~np.isfinite(self.losses) & ~self.skipped

    @property
    def broke_at(self) -> int | None:
        """The first step whose loss is not finite though the scaler did not skip it; None where none is so."""
        return int(self._is_bad.argmax()) if self._is_bad.any() else None

    @property
    def tail_loss(self) -> float:
        """Mean loss of the tail's updates; nan if one of its losses is, or nothing was updated."""
        return _mean(self.losses[self._tail])

    @property
    def tail_log_norm(self) -> float:
        """Mean logarithm of the gradient norm of the tail's updates; nan without norms, minus infinite where there was
        no gradient."""
        norms = self.norms[self._tail]
        with np.errstate(divide="ignore"):
            return _mean(np.log(norms[~np.isnan(norms)]))

    @property
    def _tail(self) -> Array:
        is_late = np.arange(len(self)) >= len(self) - share(len(self), TAIL_FRACTION)
        return np.asarray(is_late & ~self.skipped)

    def smoothed(self, width: int) -> Array:
        """The mean of each loss and those before it, `width` in all, without skipped steps; nan before there are as
        many, and where one of them is not finite."""
        kept = pd.Series(np.where(self._is_bad | self.skipped, np.nan, self.losses)).rolling(width, min_periods=1)
        return np.asarray(kept.mean().where(pd.Series(self._is_bad, dtype=float).rolling(width).sum() == 0))


def _mean(values: Array) -> float:
    return float(values.mean()) if len(values) else math.nan


def curve_of(run: Run) -> Curve | None:
    """A run's curve, read from its folder; None where it has no step with a loss."""
    with suppress(OSError):
        state = (run.path / STEPS_FILE).stat()
        curve = _read(run.path, state.st_mtime_ns, state.st_size)
        return curve if curve.broke_at is not None or not np.isnan(curve.losses).all() else None
    return None


@lru_cache(maxsize=512)
def _read(folder: Path, _changed_ns: int, _size_bytes: int) -> Curve:
    rows = [(step.loss, step.gradient_norm, bool(step.is_skipped)) for step in first_steps(folder, MAX_STEPS)]
    table = np.array(rows, dtype=float).reshape(-1, 3)
    return Curve(table[:, 0], table[:, 1], table[:, 2] == 1)


def steps_to_loss(curve: Curve, baseline: Curve) -> float:
    """Steps until a curve's smoothed loss crosses the target; infinite if it never does, or there is none.

    The target is the baseline's smoothed loss after three quarters of its steps. Both are smoothed alike, so that they
    are late alike; between two steps the crossing lies on a straight line.
    """
    width = share(len(baseline), SMOOTHED_FRACTION)
    target = baseline.smoothed(width)[share(len(baseline), TARGET_FRACTION) - 1]
    values = curve.smoothed(width)
    if not (values <= target).any():
        return math.inf
    place = int((values <= target).argmax())
    before = values[place - 1] if place else math.nan
    return place + 1 - float((target - values[place]) / (before - values[place]) if before > target else 0.0)


class Difference(NamedTuple):
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
        """The figure beside its limit: `loss +0.4 nat, limit 0.008`, `gradient norm x3, limit x1.02`."""
        form, unit = ("{:.3g}".format, " nat") if self.name == "loss" else (lambda log: f"x{ratio(log):.3g}", "")
        sign = "+" if unit and self.value > 0 else ""
        apart = "" if self.is_beyond else f", seeds lie {form(self.apart or 0.0)} apart"
        return f"{self.name} {sign}{form(self.value)}{unit}{apart}, limit {form(self.limit or 0.0)}"


def ratio(logarithm: float) -> float:
    """The number that the logarithm is of; the largest number there is for what is larger."""
    return math.exp(min(logarithm, 709.0))


class Judgement(NamedTuple):
    """What is to be said of a row, by its loss and its gradient norm against the baseline's.

    `follows` says whether it trains like the baseline, None where that cannot be told; `words` say the same (`yes`,
    `NO: loss`, `undecided: gradient norm`, `not judged: ...`), and `why` with figures.
    """

    follows: bool | None
    words: str
    why: str = ""
    differences: Mapping[str, Difference] = {}


def judge(curves: Curves, baseline: Curves) -> Judgement:
    """The judgement on the runs of a row, one of each seed, against those of the baseline."""
    broken = [place for curve in curves.values() if (place := curve.broke_at) is not None]
    if broken:
        words = f"not finite from step {min(broken)}"
        return Judgement(False, f"NO: {words}", f"the loss is {words} on")
    shared = [seed for seed in curves if seed in baseline]
    steps = min(map(len, [*baseline.values(), *(curves[seed] for seed in shared)]), default=0)
    tails, row_tails = _tails(baseline, steps), _tails({seed: curves[seed] for seed in shared}, steps)
    losses = tails["loss"]
    reasons = {
        "the baseline has no run that ended well": not baseline,
        "no run of the baseline has its seed and data": not shared,
        f"{steps} steps, of which {MIN_STEPS} are needed": steps < MIN_STEPS,
        "the baseline's own loss is not finite": not np.isfinite(losses).all(),
        f"the baseline has {len(losses)} of the {MIN_SEEDS} seeds that tell its spread": len(losses) < MIN_SEEDS,
        "the baseline's seeds make no difference": losses.nunique() == 1,
    }
    reason = next((text for text, is_so in reasons.items() if is_so), "")
    differences: dict[str, Difference] = {}
    for name in tails if steps >= MIN_STEPS else ():
        # A loss that is nan is a difference beyond every limit; a norm that is nan was not recorded.
        values = losses if name == "loss" else tails[name].dropna()
        changes = (row_tails[name] - values).reindex(row_tails.index)
        changes = changes if name == "loss" else changes.dropna()
        if len(changes):
            limit = limit_of(values.to_numpy(), len(changes))
            apart = None if limit is None else float(np.ptp(values)) / math.sqrt(len(changes))
            differences[name] = Difference(name, float(changes.mean(skipna=False)), apart, limit)
    beyond = [each for each in differences.values() if each.is_beyond]
    far = beyond or [each for each in differences.values() if each.is_outside]
    names, why = ", ".join(each.name for each in far), "; ".join(each.why for each in far)
    if beyond:
        return Judgement(False, f"NO: {names}", why, differences)
    words = f"not judged: {reason}" if reason else f"undecided: {names}" if far else "yes"
    return Judgement(None if reason or far else True, words, why or reason, differences)


def _tails(curves: Curves, steps: int) -> pd.DataFrame:
    """Loss and logarithm of the gradient norm over the tail of the first steps, a row for each seed."""
    cut = [curve.first(steps) for curve in curves.values()]
    rows = [(curve.tail_loss, curve.tail_log_norm) for curve in cut]
    return pd.DataFrame(rows, pd.Index(list(curves), tupleize_cols=False), ["loss", "gradient norm"], dtype=float)


def limit_of(values: Array, pairs: int) -> float | None:
    """How far the mean of so many differences may be from none, by a figure of each of the baseline's seeds."""
    if len(values) < MIN_SEEDS or len(set(values)) == 1 or not np.isfinite(values).all():
        return None
    quantile = float(scipy.special.stdtrit(len(values) - 1, 0.5 + CONFIDENCE / 2))
    return quantile * float(values.std(ddof=1)) * math.sqrt(2 / pairs)
