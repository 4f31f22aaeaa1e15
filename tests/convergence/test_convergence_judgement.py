"""Whether a row trains like its baseline: what is broken is told, what is only rounded is not."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from report_results import set_outcome, write_sweep
from simulated_convergence import rates

from lmbench.cli import main
from lmbench.convergence.judgement import Curve, Difference, Judgement, judge, steps_to_loss

STEPS, MOST = 120, 300
NAN = math.nan


def curve_of(losses, norms, skipped=()):
    return Curve(np.array(losses), np.array(norms), np.isin(np.arange(len(losses)), list(skipped)))


def trained(seed, offset=0.0, scale=1.0, noise=0.0, steps=STEPS):
    """A run that comes down from 6 nat with the batches' bumps, which all seeds have in common."""
    bumps, own = np.random.default_rng(99), np.random.default_rng(seed)
    level = 0.02 * own.normal() + offset
    losses = 4 + 2 * np.exp(-np.arange(MOST) / 40) + 0.1 * bumps.normal(size=MOST) + level
    losses += noise * own.normal(size=MOST)
    norms = scale * np.exp(0.1 * bumps.normal(size=MOST) + 0.01 * own.normal())
    return curve_of(losses, norms).first(steps)


BASELINE = {seed: trained(seed) for seed in range(5)}


def changed(curve, losses=None, norms=None, skipped=()):
    return curve_of(curve.losses if losses is None else losses, curve.norms if norms is None else norms, skipped)


def of(curve, baseline=BASELINE):
    return judge({0: curve}, baseline)


HONEST = {
    "the same again": trained(0),
    "rounded": trained(0, noise=1e-3),
    "as another seed": trained(7),
    "the scaler skipped some": changed(
        trained(0), norms=[math.inf if i in (3, 100) else n for i, n in enumerate(trained(0).norms)], skipped=(3, 100)
    ),
    "the loss of a skipped step is none": changed(
        trained(0), [NAN if i == 110 else loss for i, loss in enumerate(trained(0).losses)], skipped=(110,)
    ),
    "no norms were recorded": changed(trained(0), norms=[NAN] * STEPS),
}


@pytest.mark.parametrize("name", HONEST)
def test_what_is_only_rounded_is_not_flagged(name):
    found = of(HONEST[name])
    assert found.follows is True, found.words
    assert (found.words, found.why) == ("yes", "")


BROKEN = {
    "gradients three times as long": (trained(0, scale=3.0), "NO: gradient norm", "gradient norm x3, limit"),
    "gradients a tenth shorter": (trained(0, scale=0.9), "NO: gradient norm", "gradient norm x0.9, limit"),
    "no gradient": (changed(trained(0), norms=[0.0] * STEPS), "NO: gradient norm", "there is no gradient"),
    "gradients that overflow": (
        changed(trained(0), norms=[math.inf] * STEPS), "NO: gradient norm", "the gradient norm is not finite",
    ),
    "nothing is updated": (changed(trained(0), [6.0] * STEPS), "NO: loss", "nat above, limit"),
    "half a nat worse": (trained(0, offset=0.5), "NO: loss", "loss 0.5 nat above, limit"),
    "half a nat better": (trained(0, offset=-0.5), "NO: loss", "loss 0.5 nat below, limit"),
    "nan at step 50": (
        changed(trained(0), [*trained(0).losses[:50], *[NAN] * 70]), "NO: not finite from step 50",
        "the loss is not finite from step 50 on",
    ),
    "one infinity": (
        changed(trained(0), [math.inf if i == 9 else loss for i, loss in enumerate(trained(0).losses)]),
        "NO: not finite from step 9", "the loss is not finite from step 9 on",
    ),
    "every step skipped": (
        changed(trained(0), skipped=range(STEPS)), "NO: loss", "none of the last steps was an update",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_told_with_its_figure(name):
    curve, words, why = BROKEN[name]
    found = of(curve)
    assert found.follows is False
    assert found.words == words
    assert why in found.why


NOT_JUDGED = {
    "two seeds": (trained(0), {s: trained(s) for s in range(2)}, "the baseline has 2 of the 3 seeds"),
    "other seeds": (trained(0), {s: trained(s) for s in range(5, 9)}, "no run of the baseline has its seed and data"),
    "seeds that are none": (trained(0), dict.fromkeys(range(4), trained(0)), "the baseline's seeds make no difference"),
    "few steps": (trained(0, steps=12), BASELINE, "12 steps, of which 20 are needed"),
    "a broken baseline": (
        trained(0), {s: changed(trained(s), [NAN] * STEPS) for s in range(4)}, "the baseline's own loss is not finite",
    ),
    "no baseline": (trained(0), {}, "the baseline has no run that ended well"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_JUDGED)
def test_what_cannot_be_judged_says_why(name):
    curve, baseline, reason = NOT_JUDGED[name]
    found = of(curve, baseline)
    assert found.follows is None
    assert found.words.startswith(f"not judged: {reason}")


def test_a_row_outside_of_the_seeds_but_within_the_limit_is_undecided():
    losses = [curve.tail_loss for curve in BASELINE.values()]
    apart = max(losses) - min(losses)
    found = of(trained(0, offset=1.2 * apart))
    assert found.follows is None
    assert found.words == "undecided: loss"
    assert f"seeds lie {apart:.3g} apart" in found.why
    # More of its own seeds tell.
    every = {seed: trained(seed, offset=1.2 * apart) for seed in range(5)}
    assert judge(every, BASELINE).words == "NO: loss"


def test_runs_of_other_lengths_are_compared_over_the_steps_they_have_in_common():
    longer = {seed: trained(seed, steps=300) for seed in range(5)}
    assert of(trained(0, steps=90), longer).words == "yes"


def test_the_simulated_rates_are_what_the_module_says():
    found = rates(5, 1, 1500)
    assert 0.04 < found["NO"] < 0.09
    assert rates(5, 1, 600, shared=0.5)["NO"] < 0.025
    assert rates(5, 1, 600, shift=10.0, shared=0.9)["NO"] > 0.98


# the same loss


def test_smoothing_leaves_out_what_was_skipped_and_stops_at_what_is_not_finite():
    def smoothed(losses, width, skipped=()):
        return curve_of(losses, losses, skipped).smoothed(width).tolist()

    assert smoothed([1.0, 2.0, 3.0, 6.0], 2)[1:] == [1.5, 2.5, 4.5]
    assert math.isnan(smoothed([1.0, 2.0], 2)[0])
    assert smoothed([1.0, NAN, 3.0, 5.0], 2, [1])[1:] == [1.0, 3.0, 4.0]
    found = smoothed([1.0, NAN, 3.0, 5.0], 2)
    assert [math.isnan(value) for value in found] == [True, True, True, False]


def test_a_row_that_learns_half_as_fast_takes_twice_the_steps():
    falling = curve_of(6 - 0.01 * np.arange(200), np.ones(200))
    slower = curve_of(6 - 0.005 * np.arange(400), np.ones(400))
    own, other = steps_to_loss(falling, falling), steps_to_loss(slower, falling)
    assert own == pytest.approx(150)
    # Both are smoothed over the same 20 steps, and so 9.5 steps late.
    assert other - 10.5 == pytest.approx(2 * (own - 10.5))
    assert math.isinf(steps_to_loss(slower.first(200), falling))


# in the report


@pytest.fixture
def home(tmp_path):
    """fp32 with three seeds, a good row, a broken one, and two that died."""

    def edit(run, axes, repeat):
        run["data"]["source"] = "text"
        run["device_state"] = {"mean_power_w": 400.0}
        if axes["trainer.precision"] == "16-mixed":
            set_outcome(run, "oom", "backward", requested_bytes=2**30)
            if axes["seed_everything"] == 1:
                set_outcome(run, "timeout", "forward")

    axes = {"trainer.precision": ["32-true", "bf16-mixed", "bf16-true", "16-mixed"], "seed_everything": [0, 1, 2]}
    home = write_sweep(tmp_path, "mine", axes, view="convergence", edit=edit)
    offsets = {"32-true": 0.0, "bf16-mixed": 1e-4, "bf16-true": 0.4}
    for path in home.glob("runs/*/steps.jsonl"):
        run = json.loads((path.parent / "run.json").read_text())
        curve = trained(run["config"]["seed_everything"], offset=offsets[run["precision"]])
        path.write_text("".join(
            json.dumps({"step": i, "stage": "window", "loss": loss, "gradient_norm": norm}) + "\n"
            for i, (loss, norm) in enumerate(zip(curve.losses, curve.norms, strict=True))
        ))  # fmt: skip
    return home


def test_seeds_are_repeats_of_a_row_and_runs_that_died_are_rows(home, capsys):
    assert main(["report", str(home), "--format", "markdown"]) == 0
    text = capsys.readouterr().out
    assert "4 cells, 12 runs (9 ok, 2 OOM, 1 timeout)" in text
    assert "yardstick, 3 seeds" in text
    assert "OOM (backward)" in text
    answer = next(line for line in text.splitlines() if "Does not train like fp32 eager" in line)
    assert "bf16-true (" in answer
    assert "Did not end: 16-mixed (OOM (backward))." in text
    assert "Trains like fp32 eager: bf16-mixed (" in text


def test_energy_is_that_of_the_time_to_the_same_loss(home, capsys):
    assert main(["report", str(home), "--format", "csv"]) == 0
    rows = {row["precision"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    assert float(rows["bf16-mixed"]["energy_to_loss_j"]) == pytest.approx(
        400 * float(rows["bf16-mixed"]["time_to_loss_s"])
    )
    assert math.isinf(float(rows["bf16-true"]["time_to_loss_s"]))


def test_steps_are_read_only_where_a_view_asks_for_them(home, capsys):
    assert main(["report", str(home), "--view", "precision", "--format", "csv"]) == 0
    assert "trains_alike" not in capsys.readouterr().out


def test_figures_beyond_all_measure_are_shown_as_what_ran_away(home, capsys):
    for path in home.glob("runs/bf16-*/steps.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line | {"loss": 1e308, "gradient_norm": 1e300}) + "\n" for line in lines))
    for path in home.glob("runs/32-true-*/steps.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        norm = 1e-99 if path.parent.name.startswith("32-true-0") else 1e99
        path.write_text("".join(json.dumps(line | {"gradient_norm": norm}) + "\n" for line in lines))
    assert main(["report", str(home), "--format", "markdown"]) == 0
    assert "bf16-mixed | NO: not finite from step 0" in capsys.readouterr().out


def test_a_file_of_steps_that_is_torn_or_gone_leaves_the_others(home, capsys):
    paths = sorted(home.glob("runs/32-true-*/steps.jsonl"))
    Path(paths[2]).unlink()
    paths[1].write_text(paths[1].read_text()[:-30])
    assert main(["report", str(home), "--format", "markdown"]) == 0
    assert "the baseline has 2 of the 3 seeds" in capsys.readouterr().out


def test_a_loss_just_beyond_its_limit_is_told_with_digits_that_show_it():
    why = Judgement((Difference("loss", 0.01832, 0.01, 0.01807),)).why
    assert why == "loss 0.0183 nat above, limit 0.0181"
