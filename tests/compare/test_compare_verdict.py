"""Sides that were measured apart: ratios against SciPy, the order of verdicts, and what is detected, by simulation with
a fixed seed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from comparison_runs import decided
from scipy import stats
from tables import cases, stored

from lmbench.compare.noise import measure_noise
from lmbench.records.statistics import Ratio, detectable_fraction, holm, ratio_of

TRIALS = 1500
#: Three standard errors of a rate of 5 % in this many trials.
SLACK = 0.017


def draws(seed, n, std, mean=0.05):
    return mean * np.random.default_rng(seed).lognormal(0, std, n)


@cases("""
- [n_a, n_b]
- [2, 2]
- [5, 3]
- [3, 12]
""")
def test_the_ratio_is_scipys_welch_test_on_logarithms(n_a, n_b):
    a, b = draws(n_a, n_a, 0.004), draws(100 + n_b, n_b, 0.011, mean=0.051)
    ratio = ratio_of(a, b)
    welch = stats.ttest_ind(np.log(b), np.log(a), equal_var=False)
    assert ratio.p == pytest.approx(welch.pvalue, rel=1e-9)
    limits = np.exp([*welch.confidence_interval(0.95), *welch.confidence_interval(0.9)])
    assert [ratio.low, ratio.high, ratio.equal_low, ratio.equal_high] == pytest.approx(limits, rel=1e-12)
    assert ratio.point == pytest.approx(stats.gmean(b) / stats.gmean(a))


@cases("""
- [a, b, expected]
- [[5368709120, 5368709120, 5368709120], [5368709120, 5368709120], [1.0, 1.0, 1.0, 1.0]]
- [[3, 3], [6, 6, 6], [2.0, 2.0, 2.0, 0.0]]
- [[2], [3, 3], [1.5, null, null, null]]
""")
def test_a_ratio_without_spread_is_exact_and_of_one_repeat_has_no_interval(a, b, expected):
    ratio = ratio_of(a, b)
    for value, exact in zip((ratio.point, ratio.low, ratio.high, ratio.p), expected, strict=True):
        assert value == (exact and pytest.approx(exact))


def test_holm_by_its_definition():
    # Holm 1979, by hand: 0.01 x 4, then 0.02 x 3 = 0.06 (0.03 x 2 = 0.06), then 0.04 x 1 raised to 0.06.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([]) == []


def test_noise_of_repeats_is_their_own_spread_or_the_machines_drift():
    noise = measure_noise(draws(7, 40, 0.003))
    assert (noise.n, noise.std_fraction) == (40, pytest.approx(0.003, rel=0.3))
    # Two halves of 20: 95 % of their differences are below 1.96 standard errors.
    assert noise.floor_fraction == pytest.approx(1.96 * noise.std_fraction * math.sqrt(2 / 20), rel=0.15)
    drifting = measure_noise(draws(7, 12, 0.001) * (1 + 0.002 * np.arange(12)))
    assert drifting.floor_fraction >= drifting.drift_fraction == pytest.approx(0.012, rel=0.1)


@cases("ends | changes | options | expected | reason", *stored("verdicts"))
def test_a_verdict_follows_from_interval_tolerance_floor_and_correction(ends, changes, options, expected, reason):
    low, point, high = ends
    ratio = replace(Ratio(point, low, high, 0.001, 5, 5, 0.003, 0.003, low, high), **changes)
    decision = decided(ratio, **options)
    assert decision.word == expected
    assert reason in decision.reason


@cases("""
- [repeats, spread, effect]
- [5, 0.003, 0.02]
- [3, 0.02, null]
- [5, 0.02, null]
- [8, 0.02, null]
""")
def test_a_change_that_is_detectable_is_detected_in_95_of_100_cases(repeats, spread, effect):
    """In simulated comparisons; `effect` is by default the change that is said to be detectable."""
    times = np.exp(np.random.default_rng(repeats).normal(0, spread, (TRIALS, 2, repeats)))
    factor = 1 + (effect or detectable_fraction(spread, repeats))
    slower = sum(decided(ratio_of(a, b * factor)).word == "slower" for a, b in times)
    # At three repeats the degrees of freedom vary between 2 and 4, so that their mean predicts the rate less well.
    assert slower / TRIALS >= 0.95 - (0.03 if repeats == 3 else SLACK)
