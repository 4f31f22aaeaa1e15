"""Sides measured in turn: what a look may say, what it promises over all looks, and how slow processes are named."""

from __future__ import annotations

import math

import numpy as np
import pytest
from comparison_runs import make_run
from simulated_rounds import CONDITIONS, EFFECT, Noise, differences, simulate

from lmbench.compare.comparison import compare
from lmbench.compare.rounds import FIRST_LOOK, looks, ratio_by_rounds, rounds_needed
from lmbench.compare.verdict import decide

TRIALS = 800
#: Four standard errors of 5 % in so many trials.
SLACK = 4 * math.sqrt(0.05 * 0.95 / TRIALS)


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_change_that_is_none_is_found_in_at_most_5_of_100_comparisons_over_all_looks(name):
    found = simulate(CONDITIONS[name], TRIALS, rounds=40)
    assert found.slower + found.faster <= 0.05
    assert min(found.slower, found.faster) >= 0


def test_a_look_at_every_round_is_what_a_t_test_does_not_survive():
    # The simulation can find what it looks for: the usual 5 % limit at each look alarms far more often.
    drawn = differences(Noise(0.02), TRIALS, 40, 0.0, np.random.default_rng(0))
    n = np.arange(1, 41)
    means = np.cumsum(drawn, axis=-1) / n
    spreads = np.sqrt(np.maximum(np.cumsum(drawn**2, axis=-1) / n - means**2, 0) * n / np.maximum(n - 1, 1))
    alarms = np.abs(means[:, 3:]) > 2.1 * (spreads / np.sqrt(n))[:, 3:]
    assert alarms.any(axis=-1).mean() > 0.15


@pytest.mark.parametrize(
    ("name", "effect", "rounds", "same", "slower"),
    [
        ("spread 0.3 %", EFFECT, 20, 0, 0.95),
        ("spread 0.5 %", EFFECT, 20, 0, 0.95),
        ("spread 1 %", EFFECT, 20, 0, 0.95),
        ("0.5 %, drift 1 % a round", EFFECT, 20, 0, 0.95),
        ("0.3 %, two clocks, 2 %", EFFECT, 60, 0, 0.95),
        ("0.5 %, 1 in 5 slow by 10 %", EFFECT, 60, 0, 0.95),
        ("1 %, 1 in 5 slow by 30 %", EFFECT, 60, 0, 0.95),
        ("spread 0.3 %", 0.0, 20, 0.90, 0),
        ("spread 0.5 %", 0.0, 20, 0.90, 0),
        ("0.5 %, drift 1 % a round", 0.0, 20, 0.90, 0),
    ],
)
def test_a_change_is_found_and_no_change_is_called_same(name, effect, rounds, same, slower):
    rates = simulate(CONDITIONS[name], TRIALS, effect, rounds)
    assert rates.same >= same
    assert rates.slower >= slower


@pytest.mark.parametrize("name", ["spread 0.5 %", "0.3 %, two clocks, 2 %", "0.5 %, 1 in 5 slow by 10 %"])
def test_a_change_of_the_gate_is_called_same_in_at_most_5_of_100_comparisons(name):
    assert simulate(CONDITIONS[name], TRIALS, 0.01).same <= 0.05 + SLACK


def draws(seed, rounds, spread, effect=0.0):
    generator = np.random.default_rng(seed)
    a = np.exp(generator.normal(0, spread, rounds))
    return a.tolist(), (np.exp(generator.normal(math.log1p(effect), spread, rounds))).tolist()


def decided(ratio):
    return decide(ratio, tolerance=0.01, floor=None, adjusted_p=ratio.p, family=1)


def test_the_ratio_of_a_comparison_says_what_the_looks_say():
    for seed in range(60):
        a, b = draws(seed, 12, 0.006, 0.012 * (seed % 3))
        found = ratio_by_rounds(a, b)
        look = looks(np.array(found.differences), 0.01)
        word = decided(found).word
        assert (word == "same") == bool(look.same[-1])
        assert (word in ("faster", "slower")) == bool(look.changed[-1])
        # What is shown is what was tested.
        assert (word in ("faster", "slower")) == (found.excludes_one and word != "same")
        assert found.low - 1e-5 <= found.equal_low <= found.point <= found.equal_high <= found.high + 1e-5


def test_sides_that_change_places_give_the_inverse():
    a, b = draws(6, 9, 0.004, 0.01)
    there, back = ratio_by_rounds(a, b), ratio_by_rounds(b, a)
    assert back.point == pytest.approx(1 / there.point, rel=1e-4)
    assert back.p == pytest.approx(there.p)


def test_figures_without_spread_are_their_own_ratio_and_too_few_rounds_decide_nothing():
    assert ratio_by_rounds([2.0] * 5, [2.0] * 5).p == 1.0
    assert ratio_by_rounds([2.0] * 5, [3.0] * 5).low == pytest.approx(1.5)
    assert ratio_by_rounds([1.0], [1.1]).p is None
    decision = decided(ratio_by_rounds(*draws(1, FIRST_LOOK - 1, 1e-5, 0.1)))
    assert (decision.word, decision.reason[:9]) == ("undecided", "rounds: 3")


@pytest.mark.parametrize("name", ["spread 0.5 %", "spread 1 %"])
def test_the_rounds_that_a_hint_names_give_a_verdict_in_90_of_100_comparisons(name):
    noise = CONDITIONS[name]
    seen = differences(noise, 5, 8, 0.0, np.random.default_rng(11))
    needed = [n for row in seen if (n := rounds_needed(row.tolist(), 0.01)) is not None]
    assert len(needed) == 5
    rates = [simulate(noise, 200, rounds=n, seed=n) for n in needed]
    # Eight rounds show their spread to a third or so.
    assert np.median([rate.same + rate.slower + rate.faster for rate in rates]) >= 0.80


def test_a_spread_that_no_number_of_rounds_overcomes_is_said():
    found = ratio_by_rounds(*draws(0, 9, 0.5))
    assert rounds_needed(found.differences, 0.01) is None
    assert decided(found).reason.endswith(
        "no number of rounds is likely to give a verdict: widen the gate, or quiet the machine"
    )


# Comparisons of records.


def make_rounds(folder, times, changes=None):
    """A folder as `compare --run` leaves it: a pair of step times a round; `changes` by (side, round)."""
    for at, pair in enumerate(times):
        for side, step_s in zip("AB", pair, strict=True):
            sweep = {"name": "cmp", "cell": side, "axes": {"side": side}, "repeat": at, "load_per_core": 0.5}
            more = (changes or {}).get((side, at), {})
            sweep |= more.pop("sweep", {})
            make_run(folder / "runs", step_s, sweep=sweep, run_id=f"{side}-r{at}", **more)
    return f"{folder}@side=A", f"{folder}@side=B"


def quiet(rounds, seed=0, spread=0.002):
    a, b = draws(seed, rounds, spread)
    return [(0.05 * x, 0.05 * y) for x, y in zip(a, b, strict=True)]


def test_runs_of_one_comparison_are_paired_by_round_and_others_are_not(tmp_path):
    found = compare(*make_rounds(tmp_path / "c", [(0.05 * 1.05**i, 0.05 * 1.05**i) for i in range(6)]), 0.01)
    assert (found.verdict, found.cells[0].by_rounds) == ("same", True)
    other = make_rounds(tmp_path / "d", quiet(6))[1]
    apart = compare(f"{tmp_path / 'c'}@side=A", other, 0.01)
    assert not apart.cells[0].by_rounds


def test_a_slow_process_is_named_with_its_state_and_hides_nothing(tmp_path):
    times = quiet(12)
    times[7] = (times[7][0], times[7][1] * 1.08)
    changes = {("B", 7): {"device_state__close__sm_clock_hz": 1.41e9, "sweep": {"load_per_core": 2.5}}}
    sides = make_rounds(tmp_path, times, changes)
    (cell,) = compare(*sides, 0.01).cells
    (slow,) = cell.slow
    assert (slow.side, slow.round, slow.run_id) == ("B", 8, "B-r7")
    assert slow.excess_fraction == pytest.approx(0.08, abs=0.01)
    assert "load per core 2.5, others 0.5" in slow.state
    assert len(cell.used_b) == 12
    assert cell.verdict == "same"


def test_slow_processes_of_one_side_only_are_no_same(tmp_path):
    times = [(a, b * (1.08 if at % 4 == 0 else 1)) for at, (a, b) in enumerate(quiet(40))]
    found = compare(*make_rounds(tmp_path, times), 0.02)
    assert found.verdict in ("undecided", "slower")
    assert len(found.cells[0].slow) == 10


def test_figures_of_any_size_end_in_a_comparison_all_the_same(tmp_path):
    far = [(1e-300, 1e300), (1e300, 1e-300), (1e-5, 1.0), (1e300, 1.0), (1.0, 1e300)]
    assert compare(*make_rounds(tmp_path / "d", far), 0.01).verdict == "undecided"


def test_a_run_whose_guard_failed_is_measured_again_and_many_are_invalid(tmp_path):
    failed = {"guards": [{"name": "window_identity", "status": "fail", "message": "1.4 % apart"}]}
    (cell,) = compare(*make_rounds(tmp_path / "c", quiet(8), {("B", 2): failed}), 0.01).cells
    assert (cell.verdict, len(cell.used_a)) == ("same", 7)
    assert [run.reason for run in cell.left_out_b] == ["guard window_identity failed: 1.4 % apart"]
    assert [run.reason for run in cell.left_out_a] == ["the other side has no run of this round that counts"]
    (cell,) = compare(*make_rounds(tmp_path / "d", quiet(8), {("B", at): failed for at in (0, 2, 5)}), 0.01).cells
    assert cell.verdict == "invalid"
    assert cell.reasons == ["guard window_identity failed in 3 of 8 runs of B: 1.4 % apart"]
