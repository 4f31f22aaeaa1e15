"""The order of decisions (design section 8), each with its reason in words."""

from __future__ import annotations

import pytest

from lmbench.compare.metrics import SIZE_WORDS
from lmbench.compare.verdict import EXIT_CODES, decide, interval, overall
from lmbench.errors import ExitCode
from lmbench.records.statistics import Ratio, ratio_of
from lmbench.report.units import change_percent, percent_short


def found(low, ratio, high, p=0.001, n_a=5, n_b=5):
    return Ratio(ratio, low, high, p, n_a, n_b, 0.003, 0.003, low, high)


def word(ratio, tolerance=0.01, floor=None, adjusted_p=None, family=1, **more):
    adjusted_p = ratio.p if adjusted_p is None else adjusted_p
    return decide(ratio, tolerance=tolerance, floor=floor, adjusted_p=adjusted_p, family=family, **more)


def test_fewer_than_three_repeats_are_undecided_and_show_the_ratio():
    decision = word(found(1.04, 1.05, 1.06, n_a=5, n_b=2))
    assert decision.word == "undecided"
    assert decision.reason == "A has 5 repeats, B has 2; a verdict takes 3 a side (+5.00 % so far)"
    assert word(ratio_of([0.05], [0.06])).word == "undecided"


def test_an_interval_inside_the_tolerance_is_same_even_if_it_excludes_no_change():
    decision = word(found(1.002, 1.004, 1.006))
    assert decision.word == "same"
    assert decision.reason == "the 90 % interval +0.20 .. +0.60 % lies within ±1 %"
    assert word(found(1.002, 1.004, 1.006), tolerance=0.005).word == "slower"


def test_same_takes_two_one_sided_tests_the_90_percent_interval_and_shows_the_95_percent_one():
    inside = Ratio(1.0, 0.989, 1.011, 1.0, 5, 5, 0.003, 0.003, 0.991, 1.009)
    decision = word(inside)
    assert decision == word(inside, floor=0.001)
    assert (decision.word, decision.reason) == ("same", "the 90 % interval -0.90 .. +0.90 % lies within ±1 %")
    assert interval(inside) == "-1.10 .. +1.10 %"


def test_the_tolerance_is_symmetric_for_the_ratio_and_its_inverse():
    assert word(found(1 / 1.02, 1.0, 1.02), tolerance=0.02).word == "same"
    assert word(found(1 / 1.0201, 1.0, 1.02, p=0.9), tolerance=0.02).word == "undecided"


@pytest.mark.parametrize(("ratio", "expected"), [((1.01, 1.02, 1.03), "slower"), ((0.97, 0.98, 0.99), "faster")])
def test_an_interval_that_excludes_no_change_is_faster_or_slower(ratio, expected):
    decision = word(found(*ratio), floor=0.005)
    assert decision.word == expected
    assert "above the A/A noise floor of 0.5 %" in decision.reason


def test_an_effect_within_the_noise_floor_is_undecided():
    decision = word(found(1.01, 1.015, 1.02), floor=0.02)
    assert decision.word == "undecided"
    assert decision.reason.endswith("but +1.50 % is not above the A/A noise floor of 2 %")
    assert word(found(1 / 1.02, 1 / 1.015, 1 / 1.01), floor=0.02).word == "undecided"


def test_same_says_where_the_noise_floor_is_wider_than_the_tolerance():
    decision = word(found(0.999, 1.0, 1.001), floor=0.03)
    assert decision.word == "same"
    assert decision.reason.endswith("but the A/A noise floor of 3 % is wider than that")


def test_what_holms_correction_takes_away_is_undecided():
    decision = word(found(1.001, 1.02, 1.04, p=0.03), adjusted_p=0.36, family=12)
    assert decision.word == "undecided"
    assert "not after Holm's correction over 12 (p 0.03 becomes 0.36)" in decision.reason


def test_a_wide_interval_says_how_many_repeats_would_do():
    decision = word(Ratio(1.005, 0.985, 1.025, 0.5, 5, 5, 0.01, 0.01, 0.99, 1.02))
    assert decision.word == "undecided"
    assert decision.reason.endswith("at this spread 34 repeats a side in all give a verdict with 90 % probability")


def test_bytes_are_larger_or_smaller():
    assert word(found(1.1, 1.1, 1.1, p=0.0), words=SIZE_WORDS).word == "larger"
    assert word(found(0.9, 0.9, 0.9, p=0.0), words=SIZE_WORDS).word == "smaller"


def test_the_gravest_verdict_stands_for_all_cells():
    assert overall(["same", "faster"]) == "faster"
    assert overall(["same", "undecided", "faster"]) == "undecided"
    assert overall(["invalid", "slower", "undecided"]) == "slower"
    assert overall(["invalid", "undecided"]) == "invalid"
    assert overall([]) == "undecided"


def test_exit_codes_are_those_of_the_design():
    codes = {word: int(code) for word, code in EXIT_CODES.items()}
    assert codes == {"same": 0, "faster": 0, "slower": 10, "undecided": 11, "invalid": 12}
    assert EXIT_CODES["slower"] is ExitCode.SLOWER


def test_figures_read_as_percent():
    assert [percent_short(x) for x in (0.01, 0.0031, 0.025, 1.5)] == ["1 %", "0.31 %", "2.5 %", "150 %"]
    assert [change_percent(x) for x in (0.0203, -0.5, 12.0)] == ["+2.03 %", "-50.00 %", "+1,200 %"]
    assert interval(found(0.98, 1.0, 1.02)) == "-2.00 .. +2.00 %"
