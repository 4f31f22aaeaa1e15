"""Whether a run trains like the baseline's run of the same seed, by the spread between the baseline's own seeds.

Two figures of each run count: the mean loss over the tail (the last quarter of the steps), and the mean logarithm of
the gradient norm there. A row's difference is taken between runs of the same seed and data, and averaged over its m
seeds. Its limit is t s sqrt(2 / m). Here s is the standard deviation of the figure between the n seeds of the baseline,
and t is Student's quantile for n - 1 degrees of freedom and 95 %. This is the prediction interval for the difference of
two runs that share nothing but their configuration. A row beyond the limit does not train like the baseline (`NO`). A
row within it, but with a larger difference than the lowest and the highest seed of the baseline have, is `undecided`.

Where a row has three seeds or more, their pairs also count, since the same seed differs by far less than two seeds do
(0.00008 against 0.011 nat). A row is refused whose loss is worse by more than 0.5 %, by the 95 % interval of Student's
t over the pairs.

A row shares initial weights and batches with the baseline's run of its seed. So with nothing changed but rounding it
differs less than two seeds do. The table has the rates of each verdict in 10 000 simulated rows of one seed, by
`python tests/experiments/simulated_convergence.py`. `shared` is the part of the variance between seeds that a row
shares with its own seed:

    seeds  shared  higher by          yes   undecided      NO
        3  nothing          0      50.4 %      42.7 %   6.9 %
        3  half             0      76.6 %      20.7 %   2.7 %
        5  nothing          0      74.7 %      19.1 %   6.2 %
        5  half             0      94.3 %       4.5 %   1.2 %
        5  9 / 10     5 std         0.5 %      17.4 %  82.1 %
        8  nothing          0      88.6 %       5.0 %   6.4 %
        8  9 / 10     5 std         1.0 %       2.6 %  96.4 %

Of 24 real trainings of a tiny model on text (300 steps), seeds differed by 0.014 nat and 0.7 % of the gradient norm.
Weights that differed in the last bit changed the loss by 1e-7 nat and bf16-mixed by 7e-5 nat: `yes` in every draw of
3, 5 and 8 seeds. bf16-true ended 0.13 nat higher: `NO` in every draw. In 8 of them with ten times the learning rate,
seeds differed by 0.008 nat; the last bit changed the loss by 7e-6 nat, bf16-mixed by 0.004 and bf16-true by 0.008 nat,
up as well as down. So whether a low precision trains like the baseline depends on the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lmbench.records.load import StoredRun, first_steps
from lmbench.records.statistics import mean_interval, student_quantile
from lmbench.report.units import change_range

#: The most steps that are read of a run; a file of this many takes 0.1 GB.
MAX_STEPS = 100_000
#: Fractions of the steps: the tail, over which losses and norms are averaged; the width of the moving mean that smooths
#: losses; and the point in the baseline's run whose loss other rows have to reach.
TAIL_FRACTION, SMOOTHED_FRACTION, TARGET_FRACTION = 0.25, 0.1, 0.75
#: A row whose pairs of seeds show a loss that is worse by more than this fraction does not train like the baseline.
WORSE_FRACTION = 0.005
#: The fewest seeds of the baseline that show its spread, and the fewest steps that have a meaningful tail.
MIN_SEEDS, MIN_STEPS = 3, 20

Array = np.ndarray[Any, Any]
#: The curve of one run of each seed (of weights and data).
Curves = Mapping[Any, "Curve"]


def share(count: int, fraction: float) -> int:
    """A fraction of the steps as a number of steps, at least 1."""
    return max(1, round(count * fraction))


@dataclass(frozen=True, eq=False)
class Curve:
    """Loss and gradient norm of each step from the first warm-up step on; nan where a step has none.

    `skipped` is true where the gradient scaler skipped the update. All three arrays have the shape (steps,).
    """

    losses: Array
    norms: Array
    skipped: Array

    def __len__(self) -> int:
        return len(self.losses)

    def first(self, count: int) -> Curve:
        """The curve of the first `count` steps."""
        return Curve(self.losses[:count], self.norms[:count], self.skipped[:count])

    @property
    def _is_bad(self) -> Array:
        """Which steps have a loss that is not finite although the scaler did not skip them."""
        return ~np.isfinite(self.losses) & ~self.skipped

    @property
    def broke_at(self) -> int | None:
        """The first step with a loss that is not finite, other than steps that the scaler skipped; None without one."""
        return int(self._is_bad.argmax()) if self._is_bad.any() else None

    @property
    def tail_loss(self) -> float:
        """Mean loss of the tail's updates; nan if any of these losses is nan, or if the tail has no update."""
        return _mean(self.losses[self._tail])

    @property
    def tail_log_norm(self) -> float:
        """Mean logarithm of the gradient norm of the tail's updates; nan without norms, minus infinity where a gradient
        was 0."""
        norms = self.norms[self._tail]
        with np.errstate(divide="ignore"):
            return _mean(np.log(norms[~np.isnan(norms)]))

    @property
    def _tail(self) -> Array:
        """Which steps are updates in the tail."""
        is_late = np.arange(len(self)) >= len(self) - share(len(self), TAIL_FRACTION)
        return np.asarray(is_late & ~self.skipped)

    def smoothed(self, width: int) -> Array:
        """The mean loss of the last `width` steps up to each step, skipped steps left out; nan for the first
        `width - 1` steps, and where one of these losses is not finite."""
        kept = pd.Series(np.where(self._is_bad | self.skipped, np.nan, self.losses)).rolling(width, min_periods=1)
        return np.asarray(kept.mean().where(pd.Series(self._is_bad, dtype=float).rolling(width).sum() == 0))


def _mean(values: Array) -> float:
    return float(values.mean()) if len(values) else math.nan


def curve_of(run: StoredRun) -> Curve | None:
    """The curve of a run, read from its folder; None without a file of steps, and where no step has a loss."""
    return _read(run.path)


def curves_of(runs: Mapping[Any, StoredRun]) -> dict[Any, Curve]:
    """The curves of runs by seed, without runs that have none."""
    curves = {seed: curve_of(run) for seed, run in runs.items()}
    return {seed: curve for seed, curve in curves.items() if curve is not None}


@lru_cache(maxsize=512)
def _read(folder: Path) -> Curve | None:
    rows = []
    with suppress(OSError):
        rows += [(step.loss, step.gradient_norm, bool(step.is_skipped)) for step in first_steps(folder, MAX_STEPS)]
    table = np.array(rows, dtype=float).reshape(-1, 3)
    curve = Curve(table[:, 0], table[:, 1], table[:, 2] == 1)
    return curve if curve.broke_at is not None or not np.isnan(curve.losses).all() else None


def steps_to_loss(curve: Curve, baseline: Curve) -> float:
    """Steps until a curve's smoothed loss crosses the target; infinite if it never does, or if the target is nan.

    The target is the baseline's smoothed loss after three quarters of its steps. Both curves are smoothed over the same
    number of steps, so that smoothing delays both alike. The crossing between two steps is interpolated linearly.
    """
    width = share(len(baseline), SMOOTHED_FRACTION)
    target = baseline.smoothed(width)[share(len(baseline), TARGET_FRACTION) - 1]
    values = curve.smoothed(width)
    is_reached = values <= target
    if not is_reached.any():
        return math.inf
    step = int(is_reached.argmax())
    before = values[step - 1] if step else math.nan
    return step + 1 - float((target - values[step]) / (before - values[step]) if before > target else 0.0)


class Difference(NamedTuple):
    """The difference of a figure from the baseline with the same seed: of a loss in nat, or of the logarithm of a norm.

    `apart` is the difference between the lowest and the highest seed of the baseline, divided by the square root of the
    number of pairs. A row beyond `limit` does not train like the baseline. Both are None where the baseline does not
    show its spread.
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
        """Whether the difference is within the limit, but larger than that of any two seeds."""
        return self.apart is not None and not self.is_beyond and abs(self.value) > self.apart

    @property
    def why(self) -> str:
        """The difference and its limit: `loss +0.4 nat, limit 0.008`, `gradient norm x3, limit x1.02`."""

        def text(value: float) -> str:
            return f"{value:.3g}" if self.name == "loss" else f"x{ratio(value):.3g}"

        figure = text(self.value)
        if self.name == "loss":
            sign = "+" if self.value > 0 else ""
            figure = f"{sign}{figure} nat"
        apart = "" if self.is_beyond else f", seeds lie {text(self.apart or 0.0)} apart"
        return f"{self.name} {figure}{apart}, limit {text(math.copysign(self.limit or 0.0, self.value))}"


def ratio(logarithm: float) -> float:
    """The number with this logarithm, at most 8e307, so that no logarithm overflows."""
    return math.exp(min(logarithm, 709.0))


class Judgement(NamedTuple):
    """The judgement on a row, by its loss and its gradient norm against the baseline's.

    `follows`: whether the row trains like the baseline, None if undecided or not judged. `words` is the same as text
    (`yes`, `NO: loss`, `undecided: gradient norm`, `not judged: ...`), and `why` the reason with figures.
    """

    follows: bool | None
    words: str
    why: str = ""
    differences: Mapping[str, Difference] = {}


def judge(curves: Curves, baseline: Curves) -> Judgement:
    """The judgement on the runs of a row against those of the baseline, each with one run for each seed."""
    broken = [step for curve in curves.values() if (step := curve.broke_at) is not None]
    if broken:
        words = f"not finite from step {min(broken)}"
        return Judgement(False, f"NO: {words}", f"the loss is {words} on")
    shared = [seed for seed in curves if seed in baseline]
    steps = min(map(len, [*baseline.values(), *(curves[seed] for seed in shared)]), default=0)
    tails, row_tails = _tails(baseline, steps), _tails({seed: curves[seed] for seed in shared}, steps)
    differences = {}
    for name, values in tails.items() if steps >= MIN_STEPS else ():
        changes = [value - values[seed] for seed, value in row_tails[name].items() if seed in values]
        if changes:
            levels = np.array([*values.values()])
            limit = limit_of(levels, len(changes))
            apart = None if limit is None else float(np.ptp(levels)) / math.sqrt(len(changes))
            differences[name] = Difference(name, float(np.mean(changes)), apart, limit)
    pairs_of_losses = [(tails["loss"][seed], value) for seed, value in row_tails["loss"].items()]
    # A loss may be negative, as that of a density; one of 0 has no size to compare with.
    changes = [(value - level) / abs(level) for level, value in pairs_of_losses if level]
    changes = [change for change in changes if not math.isnan(change)]
    pairs = ""
    if steps >= MIN_STEPS and len(changes) >= MIN_SEEDS:
        low, high = mean_interval(changes)
        pairs = f"loss by {len(changes)} pairs of seeds {change_range(low, high)}"
        if low > WORSE_FRACTION:
            return Judgement(False, "NO: loss", pairs, differences)
    beyond = [difference for difference in differences.values() if difference.is_beyond]
    far = beyond or [difference for difference in differences.values() if difference.is_outside]
    names, why = ", ".join(difference.name for difference in far), "; ".join(difference.why for difference in far)
    if beyond:
        return Judgement(False, f"NO: {names}", why, differences)
    if reason := _obstacle(baseline, shared, steps, [*tails["loss"].values()]):
        return Judgement(None, f"not judged: {reason}", why or reason, differences)
    if far:
        return Judgement(None, f"undecided: {names}", why, differences)
    return Judgement(True, "yes", pairs, differences)


def _obstacle(  # noqa: PLR0911 (one return for each obstacle)
    baseline: Curves, shared: Sequence[Any], steps: int, losses: Sequence[float]
) -> str:
    """Why a row cannot be judged; empty where it can.

    Args:
        shared: the row's seeds that the baseline has too.
        steps: the steps that all of these runs have.
        losses: the mean losses of the baseline's tails.
    """
    if not baseline:
        return "the baseline has no run that ended well"
    if not shared:
        return "no run of the baseline has its seed and data"
    if steps < MIN_STEPS:
        return f"{steps} steps, of which {MIN_STEPS} are needed"
    if not np.isfinite(losses).all():
        return "the baseline's own loss is not finite"
    if len(losses) < MIN_SEEDS:
        return f"the baseline has {len(losses)} of the {MIN_SEEDS} seeds that tell its spread"
    if len(set(losses)) == 1:
        return "the baseline's seeds make no difference"
    return ""


def _tails(curves: Curves, steps: int) -> dict[str, dict[Any, float]]:
    """Loss and logarithm of the gradient norm over the tail of the first `steps` steps, by seed.

    A nan loss is a difference beyond every limit. A nan norm was not recorded, and is left out.
    """
    first = {seed: curve.first(steps) for seed, curve in curves.items()}
    norms = {seed: curve.tail_log_norm for seed, curve in first.items() if not math.isnan(curve.tail_log_norm)}
    return {"loss": {seed: curve.tail_loss for seed, curve in first.items()}, "gradient norm": norms}


def limit_of(values: Array, pairs: int) -> float | None:
    """The limit of the mean difference of this many pairs of runs; None where the baseline does not show its spread.

    `values` are a figure of the baseline's seeds, one for each seed.
    """
    if len(values) < MIN_SEEDS or len(set(values)) == 1 or not np.isfinite(values).all():
        return None
    return student_quantile(len(values) - 1) * float(values.std(ddof=1)) * math.sqrt(2 / pairs)
