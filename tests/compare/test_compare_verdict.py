"""The order of decisions (design section 8), each with its reason in words."""

from __future__ import annotations

import pytest

from lmbench.compare.verdict import decide, interval
from lmbench.records.statistics import Ratio


def found(low, ratio, high, p=0.001, n_a=5, n_b=5):
    return Ratio(ratio, low, high, p, n_a, n_b, 0.003, 0.003, low, high)


def word(ratio, **options):
    return decide(ratio, **{"tolerance": 0.01, "adjusted_p": ratio.p, **options})


def test_same_takes_two_one_sided_tests_the_90_percent_interval_and_shows_the_95_percent_one():
    inside = Ratio(1.0, 0.989, 1.011, 1.0, 5, 5, 0.003, 0.003, 0.991, 1.009)
    decision = word(inside)
    assert decision == word(inside, floor=0.001)
    assert (decision.word, decision.reason) == ("same", "the 90 % interval -0.90 .. +0.90 % lies within ±1 %")
    assert interval(inside.low, inside.high) == "-1.10 .. +1.10 %"


WIDE = Ratio(1.005, 0.985, 1.025, 0.5, 5, 5, 0.01, 0.01, 0.99, 1.02)


@pytest.mark.parametrize(
    ("ratio", "options", "expected", "reason"),
    [
        (found(1.04, 1.05, 1.06, n_b=2), {}, "undecided", "repeats: A has 5, B has 2; a verdict takes 3"),
        (found(1.002, 1.004, 1.006), {}, "same", "the 90 % interval +0.20 .. +0.60 % lies within ±1 %"),
        (found(1.002, 1.004, 1.006), {"tolerance": 0.005}, "slower", "no A/A noise floor is known"),
        (found(1 / 1.02, 1.0, 1.02), {"tolerance": 0.02}, "same", "within ±2 %"),
        (found(1 / 1.0201, 1.0, 1.02, p=0.9), {"tolerance": 0.02}, "undecided", "reaches beyond ±2 %"),
        (found(1.01, 1.02, 1.03), {"floor": 0.005}, "slower", "above the A/A noise floor of 0.5 %"),
        (found(0.97, 0.98, 0.99), {"floor": 0.005}, "faster", "above the A/A noise floor of 0.5 %"),
        (found(1.01, 1.015, 1.02), {"floor": 0.02}, "undecided", "but +1.50 % is not above the A/A noise floor of 2 %"),
        (found(1 / 1.02, 1 / 1.015, 1 / 1.01), {"floor": 0.02}, "undecided", "is not above"),
        (found(0.999, 1.0, 1.001), {"floor": 0.03}, "same", "but the A/A noise floor of 3 % is wider than that"),
        (found(1.001, 1.02, 1.04, p=0.03), {"adjusted_p": 0.36, "family": 12}, "undecided",
         "not after Holm's correction over 12 (p 0.03 becomes 0.36)"),
        (WIDE, {}, "undecided", "at this spread 34 repeats a side in all give a verdict with 90 % probability"),
        (found(1.1, 1.1, 1.1, p=0.0), {"is_time": False}, "larger", "+10.00 %"),
        (found(0.9, 0.9, 0.9, p=0.0), {"is_time": False}, "smaller", "-10.00 %"),
    ],
)  # fmt: skip
def test_a_verdict_follows_from_interval_tolerance_floor_and_correction(ratio, options, expected, reason):
    decision = word(ratio, **options)
    assert decision.word == expected
    assert reason in decision.reason
