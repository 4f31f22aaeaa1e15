"""Ratios, intervals and corrections against independent computations."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from lmbench.compare.noise import measure_noise
from lmbench.records.statistics import holm, ratio_of, repeats_for


def draws(seed, n, std, mean=0.05):
    generator = random.Random(seed)
    return [mean * generator.lognormvariate(0, std) for _ in range(n)]


@pytest.mark.parametrize(("n_a", "n_b"), [(2, 2), (3, 3), (5, 3), (8, 5), (3, 12)])
def test_the_ratio_is_scipys_welch_test_on_logarithms(n_a, n_b):
    a, b = draws(n_a, n_a, 0.004), draws(100 + n_b, n_b, 0.011, mean=0.051)
    found = ratio_of(a, b)
    theirs = stats.ttest_ind([math.log(v) for v in b], [math.log(v) for v in a], equal_var=False)
    limits = theirs.confidence_interval(0.95)
    assert found.p == pytest.approx(theirs.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx((math.exp(limits.low), math.exp(limits.high)), rel=1e-12)
    assert found.point == pytest.approx(stats.gmean(b) / stats.gmean(a))


def test_a_ratio_without_spread_is_exact_and_of_one_repeat_has_no_interval():
    peak = 5_368_709_120
    equal, more, single = ratio_of([peak] * 3, [peak] * 5), ratio_of([peak] * 3, [peak * 2] * 3), ratio_of([2], [3, 3])
    assert (equal.low, equal.high, equal.p) == (1.0, 1.0, 1.0)
    assert (more.low, more.high, more.p) == (pytest.approx(2), pytest.approx(2), 0.0)
    assert (single.point, single.low, single.high, single.p) == (pytest.approx(1.5), None, None, None)


@pytest.mark.parametrize("values", [[], [0.0, 1.0], [-1.0], [math.nan], [math.inf]])
def test_values_without_a_logarithm_are_refused(values):
    with pytest.raises(ValueError, match="ratio"):
        ratio_of(values, [1.0])


def test_holm_by_its_definition():
    # Holm 1979, by hand: 0.01 x 4, then 0.02 x 3 = 0.06 (0.03 x 2 = 0.06), then 0.04 x 1 raised to 0.06.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([]) == []


@pytest.mark.parametrize("spread", [0.005, 0.01])
def test_the_repeats_that_a_hint_names_give_the_verdict_in_90_of_100_cases(spread):
    # The spread is known: no fewer repeats would do.
    needed = repeats_for(spread, 1e6, 0.01)
    trials, generator, shares = 2000, random.Random(3), []
    for repeats in (needed - 2, needed):
        same = changed = 0
        for _ in range(trials):
            a, b = ([generator.lognormvariate(0, spread) for _ in range(repeats)] for _ in "AB")
            same += ratio_of(a, b).lies_within(0.01)
            changed += ratio_of(a, [value * 1.01 for value in b]).excludes_one
        shares.append(min(same, changed) / trials)
    assert shares[0] < 0.90 < shares[1] + 0.02


def test_a_spread_that_few_repeats_showed_takes_more_of_them_and_a_hopeless_one_none():
    assert repeats_for(0.005, 4, 0.01) > repeats_for(0.005, 8, 0.01) > repeats_for(0.005, 1e6, 0.01)
    assert repeats_for(0.5, 8, 0.01) is None
    assert repeats_for(0.0, 8, 0.01) == 2


def test_noise_of_repeats_is_their_own_spread_or_the_machines_drift():
    values = draws(7, 40, 0.003)
    noise = measure_noise(values)
    assert (noise.n, noise.std_fraction) == (40, pytest.approx(0.003, rel=0.3))
    # Two halves of 20: 95 % of their differences are below 1.96 standard errors.
    assert noise.floor_fraction == pytest.approx(1.96 * noise.std_fraction * math.sqrt(2 / 20), rel=0.15)
    drifting = measure_noise([value * (1 + 0.002 * i) for i, value in enumerate(draws(7, 12, 0.001))])
    assert drifting.drift_fraction == pytest.approx(0.012, rel=0.1)
    assert drifting.floor_fraction >= drifting.drift_fraction
