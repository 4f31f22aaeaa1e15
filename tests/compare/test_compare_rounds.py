"""Sides measured in turn: verdicts after each round, their error rates over all rounds, and slow processes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import yaml
from comparison_runs import make_run
from simulated_rounds import CONDITIONS, Noise, logarithms, simulate

from lmbench.compare.comparison import compare, decide
from lmbench.compare.rounds import is_same, log_evidence, ratio_by_rounds

TRIALS = 400
#: Three standard errors of a rate of 5 % in this many trials.
SLACK = 3 * math.sqrt(0.05 * 0.95 / TRIALS)


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_change_that_is_none_is_found_in_at_most_5_of_100_comparisons_over_all_looks(name):
    rates = simulate(CONDITIONS[name], TRIALS, rounds=30)
    # Another test checks that the simulation finds real changes.
    assert rates.slower + rates.faster <= 0.05 + SLACK * ("0.9" in name)
    assert simulate(CONDITIONS[name], TRIALS, 0.01, rounds=30).same <= 0.05 + SLACK


def test_noise_that_persists_is_what_independent_rounds_do_not_survive(monkeypatch):
    monkeypatch.setattr("lmbench.compare.rounds._NOISES", ((0.0, 0.0),))
    rates = simulate(CONDITIONS["1 %, 0.9 persists"], TRIALS, rounds=30)
    assert rates.slower + rates.faster > 0.4


@pytest.mark.parametrize(
    ("name", "effect", "rounds", "same", "slower"),
    yaml.safe_load("""
- [spread 0.3 %, 0.05, 9, 0, 0.90]
- [spread 0.3 %, 0.02, 20, 0, 0.90]
- ["0.5 %, drift 1 % a round", 0.02, 25, 0, 0.90]
- [spread 1 %, 0.02, 25, 0, 0.75]
- [spread 1 %, 0.02, 60, 0, 0.90]
- ["0.3 %, two clocks, 2 %", 0.02, 60, 0, 0.90]
- ["1 %, 1 in 5 slow by 30 %", 0.02, 60, 0, 0.60]
- [spread 0.3 %, 0.0, 25, 0.90, 0]
- [spread 0.5 %, 0.0, 45, 0.90, 0]
"""),
)
def test_a_change_is_found_and_no_change_is_called_same(name, effect, rounds, same, slower):
    rates = simulate(CONDITIONS[name], TRIALS, effect, rounds)
    assert rates.same >= same
    assert rates.slower >= slower


def draws(seed, rounds, spread, effect=0.0):
    generator = np.random.default_rng(seed)
    a = np.exp(generator.normal(0, spread, rounds))
    return a.tolist(), (np.exp(generator.normal(math.log1p(effect), spread, rounds))).tolist()


def decided(ratio):
    return decide(ratio, tolerance=0.01, adjusted_p=ratio.p)


def test_the_ratio_of_a_comparison_says_what_the_looks_say():
    words = set()
    for seed in range(40):
        ratio = ratio_by_rounds(*draws(seed, 14, 0.004, 0.012 * (seed % 3)))
        differences, weights = np.array(ratio.differences), np.array(ratio.weights)
        word = decided(ratio).word
        # The interval excludes 1 exactly where the test shows a change.
        assert (math.exp(-log_evidence(differences, weights)) < 0.1) == ratio.excludes_one
        assert (word == "same", word == "undecided") == (
            is_same(differences, weights, 0.01), not ratio.excludes_one and word != "same",
        )  # fmt: skip
        assert ratio.low <= ratio.equal_low <= ratio.point <= ratio.equal_high <= ratio.high
        words.add(word)
    assert words == {"same", "slower", "undecided"}


def test_noise_that_persists_over_rounds_is_said_with_its_autocorrelation_and_shared_drift_is_none():
    def ratios(noise, rounds, count):
        shared = np.exp(np.arange(rounds) * 0.01)
        drawn = logarithms(noise, count, rounds, 0.0, np.random.default_rng(0))
        return [ratio_by_rounds(*(shared * np.exp(sides))) for sides in drawn]

    persistent, drift = Noise(0.01, persistence=0.9, sides=1), Noise(0.005, drift=0.01)
    reasons = [decided(ratio).reason for ratio in ratios(persistent, 20, 100)]
    assert sum(reason.startswith("noise persists over rounds (autocorrelation of A ") for reason in reasons) > 10
    assert not any(ratio.persistence for ratio in ratios(drift, 12, 10))


def test_figures_without_spread_are_their_own_ratio():
    assert ratio_by_rounds([2.0] * 5, [2.0] * 5).p == 1.0
    assert ratio_by_rounds([2.0] * 5, [3.0] * 5).low == pytest.approx(1.5)


# comparisons of records


def make_rounds(folder, times, changes=None):
    """Writes a folder as `compare --run` leaves it; returns the names of both sides.

    `times` has a pair of step times for each round, `changes` the changes to records by (side, round).
    """
    for repeat, pair in enumerate(times):
        for side, step_s in zip("AB", pair, strict=True):
            sweep = {"name": "cmp", "cell": side, "axes": {"side": side}, "repeat": repeat}
            record_changes = (changes or {}).get((side, repeat), {})
            make_run(folder / "runs", step_s, sweep=sweep, run_id=f"{side}-r{repeat}", **record_changes)
    return f"{folder}@side=A", f"{folder}@side=B"


def quiet(rounds):
    a, b = draws(0, rounds, 0.002)
    return [(0.05 * x, 0.05 * y) for x, y in zip(a, b, strict=True)]


def test_runs_of_one_comparison_are_paired_by_round_and_others_are_not(tmp_path):
    drifting = compare(*make_rounds(tmp_path / "c", [(0.05 * 1.05**i, 0.05 * 1.05**i) for i in range(6)]), 0.01)
    assert (drifting.verdict, drifting.cells[0].by_rounds) == ("same", True)
    far = make_rounds(tmp_path / "d", [(1e-300, 1e300), (1e300, 1e-300), (1e-5, 1.0), (1e300, 1.0), (1.0, 1e300)])
    assert compare(*far, 0.01).verdict == "undecided"
    assert not compare(f"{tmp_path / 'c'}@side=A", far[1], 0.01).cells[0].by_rounds


def test_slow_processes_of_one_side_are_no_same(tmp_path):
    times = [(a, b * (1.3 if repeat % 4 == 0 else 1)) for repeat, (a, b) in enumerate(quiet(40))]
    (cell,) = compare(*make_rounds(tmp_path / "d", times), 0.02).cells
    assert (cell.verdict, "all 10 slow ones are B's" in cell.reasons[0]) == ("undecided", True)


def test_the_reason_counts_slow_processes_of_the_other_side_too(tmp_path):
    times = [[*pair] for pair in quiet(40)]
    for side, repeats in ((0, [2]), (1, range(0, 40, 5))):
        for repeat in repeats:
            times[repeat][side] *= 1.3
    (cell,) = compare(*make_rounds(tmp_path / "d", times), 0.02).cells
    assert (cell.verdict, "but 8 of 9 slow ones are B's" in cell.reasons[0]) == ("undecided", True)


def test_a_run_whose_guard_failed_is_measured_again_and_many_are_invalid(tmp_path):
    failed = {"guards": [{"name": "window_identity", "status": "fail", "message": "1.4 % apart"}]}
    (cell,) = compare(*make_rounds(tmp_path / "c", quiet(24), {("B", 2): failed}), 0.01).cells
    assert (cell.verdict, len(cell.used_a)) == ("same", 23)
    assert [run.reason for run in cell.left_out_b] == ["guard window_identity failed: 1.4 % apart"]
    failures = {("B", repeat): failed for repeat in (0, 2, 5)}
    (cell,) = compare(*make_rounds(tmp_path / "d", quiet(8), failures), 0.01).cells
    assert cell.reasons == ["guard window_identity failed in 3 of 8 runs of B: 1.4 % apart"]
