"""What verdicts on sides that were measured apart are worth, by simulation with a fixed seed."""

from __future__ import annotations

import numpy as np
import pytest
import yaml

from lmbench.compare.verdict import decide
from lmbench.records.statistics import detectable_fraction, ratio_of

TRIALS = 1500
#: Three standard errors of 5 % in so many trials.
SLACK = 0.017


def verdicts(repeats, spreads, effect=0.0, tolerance=0.01):
    """Ratios of B over A, whose process means spread by these standard deviations of logarithms, and their verdicts."""
    generator = np.random.default_rng(repeats)
    sides = [np.exp(generator.normal(0, spread, (TRIALS, repeats))) for spread in spreads]
    ratios = [ratio_of(a, b * (1 + effect)) for a, b in zip(*sides, strict=True)]
    return ratios, [decide(ratio, adjusted_p=ratio.p, tolerance=tolerance, has_hint=False).word for ratio in ratios]


@pytest.mark.parametrize(
    ("repeats", "spreads"),
    yaml.safe_load(
        "[[3, [0.003, 0.003]], [5, [0.005, 0.005]], [8, [0.005, 0.005]], [5, [0.02, 0.02]], [5, [0.005, 0.02]]]"
    ),
)
def test_intervals_cover_and_at_most_5_of_100_verdicts_are_false(repeats, spreads):
    ratios, words = verdicts(repeats, spreads)
    assert np.mean([word in ("faster", "slower") for word in words]) <= 0.05 + SLACK
    assert np.mean([ratio.low <= 1 <= ratio.high for ratio in ratios]) == pytest.approx(0.95, abs=0.03)


@pytest.mark.parametrize(("repeats", "effect"), [(5, 0.02), (3, None), (5, None), (8, None)])
def test_a_change_that_is_detectable_is_detected_in_95_of_100_cases(repeats, effect):
    spread = 0.003 if effect else 0.02
    _, words = verdicts(repeats, (spread, spread), effect or detectable_fraction(spread, repeats))
    # At three repeats the degrees of freedom vary between 2 and 4, and their mean says less.
    assert np.mean([word == "slower" for word in words]) >= 0.95 - (0.03 if repeats == 3 else SLACK)
