"""Sides measured in turn: verdicts after each round, their error rates over all rounds, and slow processes."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from comparison_runs import decided, make_run
from simulated_rounds import MACHINES, simulate
from tables import cases

from lmbench.compare.comparison import compare
from lmbench.compare.rounds import ratio_by_rounds, rounds_until

TRIALS = 300
#: Three standard errors of a rate of 5 % in this many trials.
SLACK = 3 * math.sqrt(0.05 * 0.95 / TRIALS)


@cases("name", *MACHINES)
def test_at_most_5_of_100_verdicts_are_false_over_all_looks_on_any_machine(name):
    # Another test checks that the simulation finds real changes.
    assert simulate(MACHINES[name], TRIALS, rounds=30)[1] <= 0.05 + SLACK
    assert simulate(MACHINES[name], TRIALS, 0.0101, rounds=30)[0] <= 0.05 + SLACK


@cases("""
- [name, effect, rounds]
- [independent 0.5 %, 0.02, 6]
- [independent 1 %, 0.02, 9]
- [independent 3 %, 0.05, 12]
- ["autocorrelation 0.9, 3 %", 0.02, 9]
- ["1 %, one in five slow by 30 %", 0.30, 9]
- ["3 %, bursts to +100 %", 0.10, 8]
- [independent 0.3 %, 0.0, 6]
""")
def test_half_of_the_comparisons_find_a_change_and_no_change_within_so_many_rounds(name, effect, rounds):
    assert simulate(MACHINES[name], TRIALS, effect, rounds)[2] <= rounds


def test_the_ratio_of_a_comparison_says_what_its_bets_say():
    words, generator = set(), np.random.default_rng(0)
    for trial in range(40):
        differences = generator.normal(0.006 * (trial % 4), 0.006, 12)
        ratio = ratio_by_rounds(differences)
        word = decided(ratio).word
        # The interval excludes 1 exactly where the bets show a change.
        assert (ratio.p < 0.05) == ratio.excludes_one
        assert word == ("same" if ratio.lies_within(0.01) else "slower" if ratio.excludes_one else "undecided")
        assert ratio.low <= ratio.equal_low <= ratio.point <= ratio.equal_high <= ratio.high
        words.add(word)
    assert words == {"same", "slower", "undecided"}
    # Simulated: half of the comparisons with a spread of 1.41 % in each difference find +2 % after 7 rounds.
    assert rounds_until(0.02, 0.0141) == 8


def test_an_interval_that_bets_do_not_support_reaches_no_change():
    """Seven rounds of +11 %, and one of -10 %, which weighs less against +10 % than against none."""
    differences = [0.1197, 0.1011, 0.1049, 0.107, -0.0987, 0.1061, 0.1172, 0.0974]
    for sign in (1, -1):
        ratio = ratio_by_rounds([sign * difference for difference in differences])
        assert (ratio.p > 0.05, ratio.excludes_one) == (True, False)


def test_rounds_without_spread_are_their_own_ratio():
    assert ratio_by_rounds([0.0] * 6).p == 1.0
    ratio = ratio_by_rounds([math.log(1.5)] * 6)
    assert (ratio.low, ratio.high, ratio.p < 0.05) == (pytest.approx(1.5), pytest.approx(1.5), True)


# comparisons of records


def compared(folder, times, changes=None, tolerance=0.01):
    """Writes a folder as `compare --run` leaves it; returns the comparison of its only cell.

    `times` has a pair of step times for each round, `changes` the changes to records by (side, round).
    """
    coins = random.Random(0)
    for repeat, pair in enumerate(times):
        order = coins.choice(["AB", "BA"])
        for side, step_s in zip("AB", pair, strict=True):
            sweep = {"name": "cmp", "cell": side, "axes": {"side": side}, "repeat": repeat}
            sweep["position"] = order.index(side)
            record_changes = (changes or {}).get((side, repeat), {})
            make_run(folder / "runs", step_s, sweep=sweep, run_id=f"{side}-r{repeat}", **record_changes)
    (cell,) = compare(f"{folder}@side=A", f"{folder}@side=B", tolerance).cells
    return cell


def quiet(rounds):
    return [(0.05 * a, 0.05 * b) for a, b in np.random.default_rng(0).lognormal(0, 0.002, (rounds, 2)).tolist()]


def test_runs_of_one_comparison_are_paired_by_round_and_others_are_not(tmp_path):
    drifting = compared(tmp_path / "c", [(0.05 * 1.05**i, 0.05 * 1.05**i) for i in range(6)])
    assert (drifting.verdict, drifting.by_rounds) == ("same", True)
    far = [(1e-300, 1e300), (1e300, 1e-300), (1e-5, 1.0), (1e300, 1.0), (1.0, 1e300)]
    assert compared(tmp_path / "d", far).verdict == "undecided"
    assert not compare(f"{tmp_path}/c@side=A", f"{tmp_path}/d@side=B", 0.01).cells[0].by_rounds


@cases("""
- [peaks_b, finding]
- [[6, 7, 6, 6, 7, 6], larger]
- [[6, 6, 6, 6, 6, 5], undecided]
- [[5, 5, 5, 5, 5, 5], same]
""")
def test_peaks_that_part_the_sides_are_told_after_six_rounds(tmp_path, peaks_b, finding):
    peaks = {
        (side, repeat): peak for side, peaks in (("A", [5] * 6), ("B", peaks_b)) for repeat, peak in enumerate(peaks)
    }
    changes = {place: {"memory__run_peak_allocated_bytes": peak} for place, peak in peaks.items()}
    figures = compared(tmp_path, quiet(6), changes).metrics
    assert {figure.name: figure.finding for figure in figures}["run_peak_allocated_bytes"] == finding


def test_slow_processes_of_one_side_are_no_same(tmp_path):
    times = [(a, b * (1.3 if repeat % 4 == 0 else 1)) for repeat, (a, b) in enumerate(quiet(40))]
    cell = compared(tmp_path, times, tolerance=0.02)
    assert (cell.verdict, "10 of 10 slow ones are B's" in cell.reasons[0]) == ("undecided", True)


def test_a_run_whose_guard_failed_is_measured_again_and_many_are_invalid(tmp_path):
    failed = {"guards": [{"name": "window_identity", "status": "fail", "message": "1.4 % apart"}]}
    cell = compared(tmp_path / "c", quiet(24), {("B", 2): failed})
    assert (cell.verdict, len(cell.used_a)) == ("same", 23)
    assert [run.reason for run in cell.left_out_b] == ["guard window_identity failed: 1.4 % apart"]
    failures = {("B", repeat): failed for repeat in (0, 2, 5)}
    cell = compared(tmp_path / "d", quiet(8), failures)
    assert cell.reasons == ["guard window_identity failed in 3 of 8 runs of B: 1.4 % apart"]


def test_a_run_with_a_turn_of_no_time_is_damaged(tmp_path):
    cell = compared(tmp_path, quiet(7), {("A", 3): {"window__turn_steps_s": [0.05, 0.0]}})
    assert (cell.verdict, len(cell.used_a)) == ("same", 6)


def test_rounds_in_turns_have_the_median_difference_of_their_turns(tmp_path):
    # One turn was disturbed on both sides.
    turns = {
        (side, repeat): {"window__turn_steps_s": [1.0, 0.05 * factor, 0.06 * factor, 0.07 * factor]}
        for side, factor in (("A", 1.0), ("B", 1.03))
        for repeat in range(6)
    }
    cell = compared(tmp_path, quiet(6), turns)
    assert cell.metrics[0].ratio.differences == pytest.approx([math.log(1.03)] * 6)
    assert (cell.verdict, cell.metrics[0].ratio.point) == ("slower", pytest.approx(1.03))
