"""What follows from a run's steps: statistics of each phase over the window, rates, guards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from lmbench.records.environment import Environment
from lmbench.records.field import PerPhase
from lmbench.records.guards import evaluate_guards
from lmbench.records.measured import HostSpan, Lag, PhaseSummary, RankRecord, Throughput, Window
from lmbench.records.run import RunRecord
from lmbench.records.statistics import (
    lag1_autocorrelation,
    median_interval,
    outlier_count,
    sample_std,
    trend,
)
from lmbench.records.step import SCALARS, ScalarMeans, StepRecord, select_window
from lmbench.records.vocabulary import PHASES, SPANS


def complete_run(run: RunRecord, steps: Sequence[StepRecord], raw_wall_s: float | None = None) -> None:
    """Fill in, in place, what follows from the facts of the run and its steps (`stage` window or warm-up).

    Args:
        raw_wall_s: the window's wall time with its pauses in it; None where no window was closed.
    """
    _complete_window(run.window, steps, raw_wall_s)
    run.phases = summarize_steps(steps)
    run.scalars = _mean_scalars(steps)
    run.throughput = _throughput(run)
    run.guards = evaluate_guards(run, steps)


def rank_record(run: RunRecord, steps: Sequence[StepRecord]) -> RankRecord:
    """What a rank tells the others of its window."""
    environment = run.environment or Environment()
    return RankRecord(
        run.rank or 0,
        environment.host.hostname,
        environment.gpu.uuid,
        run.window.steps,
        run.window.tokens,
        {span: summary.mean_s for span, summary in summarize_steps(steps).items() if summary.mean_s is not None},
        run.memory.run_peak_allocated_bytes,
        run.memory.steady_peak_allocated_bytes,
        run.device_state.energy_j,
    )


def join_ranks(run: RunRecord, ranks: list[RankRecord]) -> None:
    """Let a run be that of all ranks: their tokens together, and the memory of the one that took most."""
    run.ranks = ranks
    for facts, name, join in (
        (run.window, "tokens", sum),
        (run.memory, "run_peak_allocated_bytes", max),
        (run.memory, "steady_peak_allocated_bytes", max),
        (run.device_state, "energy_j", sum),
    ):
        values = [getattr(rank, name) for rank in ranks]
        setattr(facts, name, None if None in values else join(values))


def _complete_window(window: Window, records: Sequence[StepRecord], raw_wall_s: float | None) -> None:
    """Subtract the pauses from the wall time, and compare it with the sum of the steps."""
    steps = [record for record in records if record.stage == "window"]
    pauses_s = [step.excluded_s or 0.0 for step in steps]
    window.steps_sum_s = math.fsum(step.step_s or 0.0 for step in steps)
    window.excluded_s = math.fsum(pauses_s)
    window.excluded_count = sum(pause_s > 0 for pause_s in pauses_s)
    selected = select_window(records, window.micro_batches)
    window.skipped_count, window.short_count = selected.skipped_count, selected.short_count
    if raw_wall_s is not None:
        window.wall_s = raw_wall_s - window.excluded_s
        window.identity_error_fraction = (window.steps_sum_s - window.wall_s) / window.wall_s


def _throughput(run: RunRecord) -> Throughput:
    """Rates of the window: its tokens over its own wall time, pauses subtracted; never from a multiple of a median.

    Without a datasheet peak for the device and the precision there is no MFU, never a guess.
    """
    tokens, wall_s, flops = run.window.tokens, run.window.wall_s, run.flops
    reason = _why_no_mfu(run)
    if tokens is None or not wall_s:
        return Throughput(mfu_reason=reason or "tokens per batch unknown")
    rate, energy_j = tokens / wall_s, run.device_state.energy_j
    # Of several ranks each has a device with that peak.
    share = rate / flops.peak_flops_per_s / (run.world_size or 1) if flops.peak_flops_per_s else None

    def product(factor: float | None, count: int | None) -> float | None:
        return None if factor is None or count is None else factor * count

    per_token, again = flops.per_token_flops, flops.recomputed_per_token_flops
    return Throughput(
        tokens_per_s=rate,
        model_flops_per_s=product(rate, per_token),
        mfu_fraction=product(share, per_token),
        mfu_causal_fraction=product(share, flops.causal_per_token_flops),
        hfu_fraction=product(share, None if per_token is None or again is None else per_token + again),
        mfu_reason=reason,
        joules_per_token=None if energy_j is None else energy_j / tokens,
    )


def _why_no_mfu(run: RunRecord) -> str | None:
    if run.flops.peak_flops_per_s is None:
        gpu = run.environment.gpu.name if run.environment else None
        return f"no datasheet peak known for {gpu or run.device_type} in {run.precision}"
    if run.flops.per_token_flops is None:
        return run.flops.reason or "the module does not tell its FLOPs"
    return run.window.tokens_reason


def host_bound_fraction(run: RunRecord) -> float | None:
    """Share of the step in phases in which the device waited for the host, by the lag probes; None without them."""
    verdicts = dict(run.probe.verdicts.items()) if run.probe.verdicts else {}
    if not verdicts:
        return None
    bound = {span for span, lag in verdicts.items() if lag.verdict == "host-bound" and span in PHASES}
    return math.fsum(summary.share_fraction or 0.0 for span, summary in run.phases.items() if span in bound)


def summarize_steps(records: Iterable[StepRecord], micro_batches: int | None = None) -> PerPhase[PhaseSummary]:
    """Statistics of the step and of every phase that was seen, over the steps that `select_window` keeps."""
    steps = select_window(records, micro_batches).used
    phases: PerPhase[PhaseSummary] = PerPhase()
    for span in SPANS:
        values = _known(step.span_s(span) for step in steps)
        if not values:
            continue
        summary = summarize(values)
        step_mean_s = phases.step.mean_s if phases.step else summary.mean_s if span == "step" else None
        summary.share_fraction = summary.mean_s / step_mean_s if summary.mean_s is not None and step_mean_s else None
        if hosts := _known(step.host_s(span) for step in steps):
            summary.host = HostSpan(statistics.fmean(hosts), min(hosts), statistics.median(hosts), max(hosts))
        if span != "other":
            lags = _known(step.lag_s(span) for step in steps)
            summary.lag = Lag(min(lags), statistics.median(lags), max(lags)) if lags else Lag()
        phases.set(span, summary)
    return phases


def _mean_scalars(records: Iterable[StepRecord]) -> ScalarMeans:
    """Mean of each logged scalar over the window's steps that have it; skipped steps have no update to describe."""
    steps = [step for step in records if step.stage == "window" and not step.is_skipped]
    series = {name: _known(getattr(step, name) for step in steps) for name in SCALARS}
    return ScalarMeans(**{name: statistics.fmean(values) for name, values in series.items() if values})


def summarize(values: Sequence[float]) -> PhaseSummary:
    """Statistics of one series of seconds in the order it was measured.

    None where the series is too short (std below 2 values, autocorrelation below 3, trend and the median's interval
    below 6, p5 and p95 below 20, p99 below 100). Raises ValueError for a value that is not finite.
    """
    series, n = np.asarray(values, dtype=float), len(values)
    if not np.isfinite(series).all():
        raise ValueError("a series with a non-finite value has no summary")
    if not n:
        return PhaseSummary(n=0)
    quantiles = np.quantile(series, [0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1]).tolist()
    least, p5, p25, median, p75, p95, p99, most = quantiles
    mean = statistics.fmean(values)
    std = sample_std(values, mean)
    low, high, coverage = median_interval(np.sort(series).tolist()) or (None, None, None)
    drift, chance = trend(values) or (None, None)
    return PhaseSummary(
        n=n,
        mean_s=mean,
        std_s=std,
        min_s=least,
        p5_s=p5 if n >= 20 else None,
        p25_s=p25,
        median_s=median,
        p75_s=p75,
        p95_s=p95 if n >= 20 else None,
        p99_s=p99 if n >= 100 else None,
        max_s=most,
        cv_fraction=std / mean if std is not None and mean > 0 else None,
        median_low_s=low,
        median_high_s=high,
        median_coverage_fraction=coverage,
        lag1_autocorrelation=lag1_autocorrelation(values, mean),
        outlier_count=outlier_count(values, median),
        trend_fraction=drift,
        trend_p=chance,
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
