"""Judgements whether a row trains like its baseline: broken rows are reported, rows with other rounding are not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from simulated_convergence import rates

from lmbench.convergence.judgement import Curve, judge, steps_to_loss

STEPS, MOST = 120, 300
NAN = math.nan


def curve_of(losses, norms=None, skipped=()):
    norms = np.ones(len(losses)) if norms is None else norms
    return Curve(np.array(losses), np.array(norms), np.isin(np.arange(len(losses)), list(skipped)))


def trained(seed, offset=0.0, scale=1.0, noise=0.0, steps=STEPS):
    """A curve that falls from 6 nat, with the bumps of the batches, which are the same for all seeds."""
    bumps, noises = np.random.default_rng(99), np.random.default_rng(seed)
    level = 0.02 * noises.normal() + offset
    losses = 4 + 2 * np.exp(-np.arange(MOST) / 40) + 0.1 * bumps.normal(size=MOST) + level
    losses += noise * noises.normal(size=MOST)
    norms = scale * np.exp(0.1 * bumps.normal(size=MOST) + 0.01 * noises.normal())
    return curve_of(losses, norms).first(steps)


def changed(losses=None, norms=None, skipped=()):
    """The first seed's curve with some values replaced, as a series or by step, and with skipped steps."""
    curve = trained(0)
    series = [np.array(curve.losses), np.array(curve.norms)]
    for values, change in zip(series, (losses, norms), strict=True):
        for step, value in (change if isinstance(change, dict) else dict(enumerate(change or ()))).items():
            values[step] = value
    return curve_of(*series, skipped)


BASELINE = {seed: trained(seed) for seed in range(5)}
CASES = {
    "the same again": (trained(0), "yes", ""),
    "rounded": (trained(0, noise=1e-3), "yes", ""),
    "the scaler skipped some": (changed(norms={3: math.inf, 100: math.inf}, skipped=(3, 100)), "yes", ""),
    "no norms were recorded": (changed(norms=[NAN] * STEPS), "yes", ""),
    "gradients three times as long": (trained(0, scale=3.0), "NO: gradient norm", "gradient norm x3, limit"),
    "no gradient": (changed(norms=[0.0] * STEPS), "NO: gradient norm", "gradient norm x0, limit"),
    "nothing is updated": (changed([6.0] * STEPS), "NO: loss", "nat, limit"),
    "half a nat worse": (trained(0, offset=0.5), "NO: loss", "loss +0.5 nat, limit"),
    "nan from step 50": (
        changed(dict.fromkeys(range(50, STEPS), NAN)), "NO: not finite from step 50",
        "the loss is not finite from step 50 on",
    ),
    "every step skipped": (
        changed(skipped=range(STEPS)), "NO: loss", "loss nan nat, limit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_broken_is_told_with_its_figure_and_what_is_only_rounded_is_not(name):
    curve, words, why = CASES[name]
    judgement = judge({0: curve}, BASELINE)
    assert (judgement.follows, judgement.words) == (words == "yes", words)
    assert why in judgement.why if why else not judgement.why


NOT_JUDGED = {
    "two seeds": ({s: trained(s) for s in range(2)}, "the baseline has 2 of the 3 seeds"),
    "other seeds": ({s: trained(s) for s in range(5, 9)}, "no run of the baseline has its seed and data"),
    "seeds that are none": (dict.fromkeys(range(4), trained(0)), "the baseline's seeds make no difference"),
    "few steps": ({s: trained(s, steps=12) for s in range(5)}, "12 steps, of which 20 are needed"),
    "a broken baseline": (
        {s: changed([NAN] * STEPS) for s in range(4)}, "the baseline's own loss is not finite",
    ),
    "no baseline": ({}, "the baseline has no run that ended well"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_JUDGED)
def test_what_cannot_be_judged_says_why(name):
    baseline, reason = NOT_JUDGED[name]
    judgement = judge({0: trained(0)}, baseline)
    assert judgement.follows is None
    assert judgement.words.startswith(f"not judged: {reason}")


def test_a_row_outside_of_the_seeds_but_within_the_limit_is_undecided_and_more_of_its_own_seeds_tell():
    apart = float(np.ptp([curve.tail_loss for curve in BASELINE.values()]))
    rows = {seed: trained(seed, offset=1.2 * apart) for seed in range(5)}
    judgement = judge({0: rows[0]}, BASELINE)
    assert (judgement.follows, judgement.words) == (None, "undecided: loss")
    assert f"seeds lie {apart:.3g} apart" in judgement.why
    assert judge(rows, BASELINE).words == "NO: loss"


@pytest.mark.parametrize(("offset", "words"), [(0.0, "yes"), (0.03, "NO: loss")])
def test_pairs_of_seeds_refuse_a_loss_that_is_worse_by_more_than_half_a_percent(offset, words):
    # Two seeds lie further apart than 0.03 nat, which is 0.7 % of the loss; the same seed differs by the noise alone.
    rows = {seed: trained(seed, offset=offset, noise=1e-3) for seed in range(3)}
    judgement = judge(rows, {seed: trained(seed) for seed in range(3)})
    assert judgement.words == words
    assert judgement.why.startswith("loss by 3 pairs of seeds +" if offset else "loss by 3 pairs of seeds ")


@pytest.mark.parametrize(("offset", "why"), [(-0.03, "loss -0.03 nat"), (0.03, "loss by 3 pairs of seeds +")])
def test_a_loss_below_zero_is_worse_where_it_is_higher(offset, why):
    # As that of a density. Here it falls from about -2 to -4.
    baseline, rows = ({s: trained(s, offset=change - 8) for s in range(3)} for change in (0.0, offset))
    assert judge(rows, baseline).why.startswith(why)


def test_the_simulated_rates_are_what_the_module_says():
    assert 0.04 < rates(5, 1, 600)["NO"] < 0.09
    assert rates(5, 1, 100, shift=10.0, shared=0.9)["NO"] > 0.95


# the same loss


def test_a_row_that_learns_half_as_fast_takes_twice_the_steps():
    falling, slower = curve_of(6 - 0.01 * np.arange(200)), curve_of(6 - 0.005 * np.arange(400))
    steps, slower_steps = steps_to_loss(falling, falling), steps_to_loss(slower, falling)
    # Both are smoothed over the same 20 steps, which delays them by 9.5 steps.
    assert (steps, slower_steps - 10.5) == pytest.approx((150, 2 * (150 - 10.5)))
    assert math.isinf(steps_to_loss(slower.first(200), falling))
