"""What the verdicts are worth, by simulation with fixed seeds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

import pytest

from lmbench.compare.verdict import decide, holm
from lmbench.records.statistics import detectable_fraction, ratio_of

TRIALS = 4000
TOLERANCE = 0.01
EFFECT = 0.02


@dataclass(frozen=True)
class Rates:
    """Shares of trials: intervals that hold the truth, intervals that exclude no change where there is none, verdicts
    `faster` or `slower` and `same` where there is none, and verdict `slower` where B takes 2 % longer."""

    coverage: float
    excluded: float
    false_verdict: float
    same: float
    detected: float


@lru_cache
def simulate(repeats, spread, spread_b, effect=EFFECT, trials=TRIALS, seed=0):
    """Rates for `repeats` processes a side whose means spread by `spread` (standard deviation of logarithms)."""
    generator = random.Random(f"{seed}, {repeats}, {spread}, {spread_b}")
    counts = [0] * 5
    for _ in range(trials):
        a = [generator.lognormvariate(0, spread) for _ in range(repeats)]
        b = [generator.lognormvariate(0, spread_b) for _ in range(repeats)]
        null, slower = ratio_of(a, b), ratio_of(a, [(1 + effect) * value for value in b])
        word = verdict(null)
        counts[0] += slower.low <= 1 + effect <= slower.high
        counts[1] += null.excludes_one
        counts[2] += word in ("faster", "slower")
        counts[3] += word == "same"
        counts[4] += verdict(slower) == "slower"
    return Rates(*(count / trials for count in counts))


def verdict(found):
    return decide(found, tolerance=TOLERANCE, floor=None, adjusted_p=found.p, family=1, has_hint=False).word


@pytest.mark.parametrize("repeats", [3, 5, 8])
@pytest.mark.parametrize("spread", [0.003, 0.005])
def test_intervals_cover_and_false_positives_stay_below_five_percent(repeats, spread):
    found = simulate(repeats, spread, spread)
    # 4000 trials: one standard error of 5 % is 0.34 %.
    assert 0.94 <= found.coverage <= 0.975
    assert found.excluded <= 0.06
    assert found.false_verdict <= 0.05


def test_five_repeats_find_two_percent():
    found = simulate(5, 0.003, 0.003)
    assert found.detected >= 0.95
    assert found.false_verdict <= 0.05
    assert found.coverage == pytest.approx(0.95, abs=0.0135)


@pytest.mark.parametrize(("spread", "spread_b"), [(0.02, 0.02), (0.005, 0.02)])
def test_false_positives_stay_below_five_percent_where_no_tolerance_hides_them(spread, spread_b):
    # Four standard errors above 5 %: the intervals are wider than the tolerance, every exclusion is a verdict.
    assert simulate(5, spread, spread_b).false_verdict <= 0.05 + 4 * 0.0034


def test_many_cells_together_alarm_at_most_as_often_as_one():
    generator, families, alarms, uncorrected = random.Random(5), 600, 0, 0
    for _ in range(families):
        found = [ratio_of(*([generator.lognormvariate(0, 0.02) for _ in range(5)] for _ in "AB")) for _ in range(20)]
        alarms += min(holm([ratio.p for ratio in found])) < 0.05
        uncorrected += any(ratio.excludes_one for ratio in found)
    assert alarms / families <= 0.05 + 3 * 0.009
    assert uncorrected / families > 0.5


@pytest.mark.parametrize("repeats", [3, 5, 8])
def test_the_detectable_change_is_detected_in_95_of_100_cases(repeats):
    effect = detectable_fraction(0.02, repeats)
    # At three repeats the degrees of freedom vary between 2 and 4, and their mean says less.
    found = simulate(repeats, 0.02, 0.02, effect=effect)
    assert found.detected == pytest.approx(0.95, abs=0.03 if repeats == 3 else 0.015)
