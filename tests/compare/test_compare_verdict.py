"""The order of decisions (design section 8), each with its reason in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from paths import DATA

from lmbench.compare.verdict import decide, interval
from lmbench.records.statistics import Ratio


def decided(ratio, **options):
    return decide(ratio, **{"tolerance": 0.01, "adjusted_p": ratio.p, **options})


def test_same_takes_two_one_sided_tests_the_90_percent_interval_and_shows_the_95_percent_one():
    inside = Ratio(1.0, 0.989, 1.011, 1.0, 5, 5, 0.003, 0.003, 0.991, 1.009)
    decision = decided(inside)
    assert decision == decided(inside, floor=0.001)
    assert (decision.word, decision.reason) == ("same", "the 90 % interval -0.90 .. +0.90 % lies within ±1 %")
    assert interval(inside.low, inside.high) == "-1.10 .. +1.10 %"


@pytest.mark.parametrize(
    ("ends", "changes", "options", "expected", "reason"), yaml.safe_load((DATA / "verdicts.yaml").read_text())
)
def test_a_verdict_follows_from_interval_tolerance_floor_and_correction(ends, changes, options, expected, reason):
    low, point, high = ends
    decision = decided(replace(Ratio(point, low, high, 0.001, 5, 5, 0.003, 0.003, low, high), **changes), **options)
    assert decision.word == expected
    assert reason in decision.reason
