"""Statistics of steps against numpy and scipy, and the rank that the others wait for."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from tables import cases

from lmbench.records.field import PerPhase
from lmbench.records.measured import Guard, RankRecord
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.statistics import median_interval, trend
from lmbench.records.step import StepRecord, select_window
from lmbench.records.summary import complete_run, late_rank, summarize, summarize_steps
from lmbench.records.vocabulary import Stage


def test_the_medians_interval_is_the_narrowest_that_covers_95_percent():
    for n in (*range(1, 200), 999, 1000, 4096, 10_001):
        low, high, coverage = median_interval(list(range(1, n + 1))) or (0, n + 1, 1.0)
        assert high == n + 1 - low
        assert coverage == pytest.approx(1 - 2 * stats.binom.cdf(low - 1, n, 0.5), rel=1e-9)
        assert coverage >= 0.95 > 1 - 2 * stats.binom.cdf(low, n, 0.5)


def test_a_single_fall_is_the_whole_drift_and_no_more():
    # The plain Theil-Sen line would drift by -11.25 and end below zero.
    assert trend([10.0, 10.0, 10.0, 1.0, 1.0, 1.0])[0] == pytest.approx(-0.9)
    assert summarize([0.010] * 3 + [0.005] * 3).trend_fraction == pytest.approx(-0.5)


@cases("n", 101, 1234, 10_000)
def test_trend_of_a_long_series_is_found_by_blocks(n):
    values = 1.0 + 0.05 * np.arange(n) / (n - 1) + np.random.default_rng(0).normal(0, 0.01, n)
    summary = summarize(values.tolist())
    assert summary.trend_fraction == pytest.approx(0.05 / 1.025, rel=0.1)
    assert summary.trend_p < 1e-6


def test_a_coarse_clock_makes_no_outliers_and_a_constant_series_no_spread():
    values = [2.0e-6] * 60 + [2.5e-6] * 40
    assert summarize(values).outlier_count == 0
    assert summarize([*values, 50e-6]).outlier_count == 1
    constant = summarize([0.25] * 30)
    assert (constant.std_s, constant.cv_fraction, constant.outlier_count) == (0, 0, 0)
    assert (constant.trend_fraction, constant.trend_p, constant.lag1_autocorrelation) == (0, 1, None)


def test_statistics_are_null_for_series_that_are_too_short_and_a_nonfinite_series_is_refused():
    for n in range(7):
        summary = summarize([1.0 + step for step in range(n)])
        nulls = [value is None for value in (summary.std_s, summary.lag1_autocorrelation, summary.median_low_s)]
        assert (summary.n, nulls) == (n, [n < 2, n < 3, n < 6])
    with pytest.raises(ValueError, match="non-finite"):
        summarize([1.0, float("nan")])


def _step(step, stage="window", micro_batches=2, is_skipped=False, step_s=1.0):
    spans = {"forward_s": 0.25, "forward_host_s": 0.2, "lag_forward_s": -0.001, "backward_s": 0.75}
    spans |= {"step_s": step_s, "step_host_s": 0.5, "lag_step_s": 0.01 * step}
    return StepRecord(step=step, stage=Stage(stage), micro_batches=micro_batches, is_skipped=is_skipped, **spans)


def test_only_full_unskipped_window_steps_enter_and_the_others_are_counted():
    warmup = _step(0, "warmup", step_s=9.0)
    records = [warmup, _step(1, is_skipped=True, step_s=9.0), _step(3, micro_batches=1, step_s=9.0), _step(2), _step(4)]
    assert [step.step for step in select_window(records)] == [2, 4]
    run = RunRecord(SCHEMA_VERSION, "ok")
    complete_run(run, records)
    assert (run.window.skipped_count, run.window.short_count) == (1, 1)
    assert (run.phases.step.n, run.phases.step.max_s) == (2, 1.0)
    assert summarize_steps([warmup]) == PerPhase()


def test_where_every_step_is_short_none_is_counted_as_left_out():
    run = RunRecord(SCHEMA_VERSION, "ok")
    run.window.micro_batches = 4
    complete_run(run, [_step(1), _step(2)])
    assert (run.window.short_count, run.phases.step.n) == (0, 2)


def test_a_loader_that_restarts_in_less_than_a_usual_wait_costs_nothing():
    run, steps = RunRecord(SCHEMA_VERSION, "ok"), [_step(step) for step in range(4)]
    for step, wait_s in zip(steps, (0.002, 0.001, 0.002, 0.002), strict=True):
        step.data_s, step.follows_loader_end = wait_s, wait_s == 0.001
    complete_run(run, steps)
    assert (run.window.loader_end_count, run.window.loader_restart_s) == (1, 0.0)


def test_parameters_of_another_dtype_than_the_precisions_are_in_the_reason_for_no_mfu():
    run = RunRecord(SCHEMA_VERSION, "ok", precision="32-true", device_type="cuda")
    run.model.dtype = "bfloat16, float32"
    complete_run(run, [_step(1)])
    assert run.throughput.mfu_reason.endswith("in 32-true with parameters in bfloat16, float32")


def test_a_run_that_is_completed_again_has_each_guard_once_and_those_of_observers_last():
    run, mine = RunRecord(SCHEMA_VERSION, "ok"), Guard("mine", "pass")
    run.guards.append(mine)
    complete_run(run, [_step(1)])
    guards = list(run.guards)
    complete_run(run, [_step(1)])
    assert (run.guards, run.guards[-1]) == (guards, mine)


@cases("""
- [turns, expected]
- [[0, 0, 0, 1, 1, 2], [2.0, 4.5, 6.0]]
# Single steps in turn, and the rest of the window without the other process.
- [[0, 1, 2, 2, 2], [1.0, 2.0, 4.0]]
- [[null, null], null]
""")
def test_a_turn_of_several_steps_has_their_trimean(turns, expected):
    steps = [_step(step, step_s=float(step)) for step in range(1, len(turns) + 1)]
    for step, turn in zip(steps, turns, strict=True):
        step.turn = turn
    run = RunRecord(SCHEMA_VERSION, "ok")
    complete_run(run, steps)
    assert run.window.turn_steps_s == expected


def test_moments_and_quantiles_have_their_own_fields():
    summary = summarize(np.random.default_rng(0).permutation(101.0 * np.arange(101)).tolist())
    names = ("min_s", "p5_s", "p25_s", "median_s", "p75_s", "p95_s", "p99_s", "max_s", "mean_s")
    expected = [101.0 * percentile for percentile in (0, 5, 25, 50, 75, 95, 99, 100, 50)]
    assert [getattr(summary, name) for name in names] == pytest.approx(expected)
    std = np.std(101 * np.arange(101), ddof=1)
    assert (summary.std_s, summary.cv_fraction) == pytest.approx((std, std / summary.mean_s))


@cases("""
- [is_ddp, times, late]
# Data, forward, backward and step of each rank; late: rank, phase and wait.
- [true, [[1, 10, 25, 36], [1, 15, 20, 36]], [1, forward, 5]]
- [true, [[4, 10, 22, 36], [1, 10, 25, 36], [1, 10, 25, 36]], [0, data, 3]]
- [false, [[1, 10, 25, 36], [6, 10, 20, 36]], [1, data, 5]]
# None where the loads are equal, where steps differ, where the forward has collectives, or for one rank.
- [true, [[1, 10, 25, 36], [1, 10, 25, 36]], []]
- [true, [[1, 10, 25, 36], [1, 15, 25, 41]], []]
- [false, [[1, 10, 25, 36], [1, 15, 20, 36]], []]
- [true, [[1, 10, 25, 36]], []]
""")
def test_the_rank_that_others_wait_for_is_found_by_the_phases_before_they_meet(is_ddp, times, late):
    names = ("data", "forward", "backward", "step")
    run = RunRecord(SCHEMA_VERSION, "ok")
    # Only DDP has buckets.
    run.communication.bucket_copy_bytes = 0 if is_ddp else None
    run.per_rank = [RankRecord(rank, mean_s=dict(zip(names, spans, strict=True))) for rank, spans in enumerate(times)]
    assert late_rank(run) == (tuple(late) or None)
