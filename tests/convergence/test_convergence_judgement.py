"""Judgements whether a row trains like its baseline: broken rows are reported, rows with other rounding are not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from simulated_convergence import rates
from tables import cases

from lmbench.convergence.judgement import Curve, judge, steps_to_loss

STEPS, MOST = 120, 300
NAN = math.nan


def trained(
    seed=0, offset=0.0, scale=1.0, noise=0.0, steps=STEPS, losses=(NAN, 0, 0), norms=(NAN, 0, 0), skipped=(0, 0)
):
    """A curve that falls from 6 nat, with the bumps of the batches, which are the same for all seeds.

    A value takes the place of the losses or norms from one step to another; the scaler skips steps from one to another.
    """
    bumps, noises = np.random.default_rng(99), np.random.default_rng(seed)
    level = 0.02 * noises.normal() + offset
    curve = 4 + 2 * np.exp(-np.arange(MOST) / 40) + 0.1 * bumps.normal(size=MOST) + level
    curve += noise * noises.normal(size=MOST)
    lengths, is_skipped = scale * np.exp(0.1 * bumps.normal(size=MOST) + 0.01 * noises.normal()), np.zeros(MOST, bool)
    for values, (value, begin, end) in ((curve, losses), (lengths, norms), (is_skipped, (True, *skipped))):
        values[begin:end] = value
    return Curve(curve, lengths, is_skipped).first(steps)


BASELINE = {seed: trained(seed) for seed in range(5)}


@cases("""
- [settings, words, why]
- [{}, "yes", null]
- [{noise: 0.001}, "yes", null]
# The scaler skipped some, whose losses and norms do not count; no norms were recorded.
- [{losses: [.nan, 100, 102], skipped: [100, 102]}, "yes", null]
- [{losses: [99, 100, 102], skipped: [100, 102]}, "yes", null]
- [{norms: [.inf, 100, 102], skipped: [100, 102]}, "yes", null]
- [{norms: [.nan, 0, 120]}, "yes", null]
- [{scale: 3.0}, "NO: gradient norm", "gradient norm x3, limit x1."]
- [{scale: 0.5}, "NO: gradient norm", "gradient norm x0.5, limit x0."]
- [{norms: [0, 0, 120]}, "NO: gradient norm", "gradient norm x0, limit"]
# Nothing is updated.
- [{losses: [6.0, 0, 120]}, "NO: loss", "nat, limit"]
- [{offset: 0.5}, "NO: loss", "loss +0.5 nat, limit"]
- [{losses: [.nan, 50, 120]}, "NO: not finite from step 50", the loss is not finite from step 50 on]
- [{skipped: [0, 120]}, "NO: loss", "loss nan nat, limit"]
""")
def test_what_is_broken_is_told_with_its_figure_and_what_is_only_rounded_is_not(settings, words, why):
    judgement = judge({0: trained(**settings)}, BASELINE)
    assert (judgement.follows, judgement.words) == (words == "yes", words)
    assert why in judgement.why if why else not judgement.why


@cases("""
- [seeds, settings, reason]
- [[0, 1], {}, the baseline has 2 of the 3 seeds]
- [[5, 6, 7, 8], {}, no run of the baseline has its seed and data]
- [[0, 1, 2, 3], {seed: 0}, the baseline's seeds make no difference]
- [[0, 1, 2, 3, 4], {steps: 12}, "12 steps, of which 20 are needed"]
- [[0, 1, 2, 3], {losses: [.nan, 0, 120]}, the baseline's own loss is not finite]
- [[], {}, the baseline has no run that ended well]
""")
def test_what_cannot_be_judged_says_why(seeds, settings, reason):
    judgement = judge({0: trained()}, {seed: trained(**{"seed": seed, **settings}) for seed in seeds})
    assert judgement.follows is None
    assert judgement.words.startswith(f"not judged: {reason}")


def test_a_row_outside_of_the_seeds_but_within_the_limit_is_undecided_and_more_of_its_own_seeds_tell():
    apart = float(np.ptp([curve.tail_loss for curve in BASELINE.values()]))
    rows = {seed: trained(seed, offset=1.2 * apart) for seed in range(5)}
    judgement = judge({0: rows[0]}, BASELINE)
    assert (judgement.follows, judgement.words) == (None, "undecided: loss")
    assert f"seeds lie {apart:.3g} apart" in judgement.why
    assert judge(rows, BASELINE).words == "NO: loss"


@cases("""
- [offset, words]
- [0.0, 'yes']
- [0.03, 'NO: loss']
""")
def test_pairs_of_seeds_refuse_a_loss_that_is_worse_by_more_than_half_a_percent(offset, words):
    # Two seeds lie further apart than 0.03 nat, which is 0.7 % of the loss; the same seed differs by the noise alone.
    rows = {seed: trained(seed, offset=offset, noise=1e-3) for seed in range(3)}
    judgement = judge(rows, {seed: trained(seed) for seed in range(3)})
    assert judgement.words == words
    assert judgement.why.startswith("loss by 3 pairs of seeds +" if offset else "loss by 3 pairs of seeds ")


@cases("""
- [offset, why]
- [-0.03, loss -0.03 nat]
- [0.03, loss by 3 pairs of seeds +]
""")
def test_a_loss_below_zero_is_worse_where_it_is_higher(offset, why):
    # As that of a density. Here it falls from about -2 to -4.
    baseline, rows = ({s: trained(s, offset=change - 8) for s in range(3)} for change in (0.0, offset))
    assert judge(rows, baseline).why.startswith(why)


def test_the_simulated_rates_are_what_the_module_says():
    assert 0.04 < rates(5, 1, 600)["NO"] < 0.09
    assert rates(5, 1, 100, shift=10.0, shared=0.9)["NO"] > 0.95


# the same loss


def test_a_row_that_learns_half_as_fast_takes_twice_the_steps():
    falling, slower = (
        Curve(6 - speed * np.arange(steps), np.ones(steps), np.zeros(steps, bool))
        for speed, steps in ((0.01, 200), (0.005, 400))
    )
    steps, slower_steps = steps_to_loss(falling, falling), steps_to_loss(slower, falling)
    # Both are smoothed over the same 20 steps, which delays them by 9.5 steps.
    assert (steps, slower_steps - 10.5) == pytest.approx((150, 2 * (150 - 10.5)))
    assert math.isinf(steps_to_loss(slower.first(200), falling))
