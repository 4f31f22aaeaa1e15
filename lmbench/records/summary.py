"""What follows from a run's steps: statistics of each phase over the window, rates, guards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lmbench.records.field import PerPhase
from lmbench.records.guards import evaluate_guards
from lmbench.records.measured import HostSpan, Lag, PhaseSummary, RankRecord, Throughput
from lmbench.records.run import Environment, RunRecord
from lmbench.records.schema import value_at
from lmbench.records.statistics import (
    lag1_autocorrelation,
    median_interval,
    outlier_count,
    sample_std,
    trend,
)
from lmbench.records.step import SCALARS, ScalarMeans, StepRecord, select_window
from lmbench.records.vocabulary import SPANS

#: Quantiles of a summary: the share below, and from how many values on.
_QUANTILES = {
    "min_s": (0, 1), "p5_s": (0.05, 20), "p25_s": (0.25, 1), "median_s": (0.5, 1), "p75_s": (0.75, 1),
    "p95_s": (0.95, 20), "p99_s": (0.99, 100), "max_s": (1, 1),
}  # fmt: skip


def complete_run(run: RunRecord, steps: Sequence[StepRecord], raw_wall_s: float | None = None) -> None:
    """Fill in, in place, what follows from the facts of the run and its steps (`stage` window or warm-up).

    Args:
        raw_wall_s: the window's wall time with its pauses in it; None where no window was closed.
    """
    # Pauses are no part of the wall time, which is compared with the sum of the steps.
    window, selected = run.window, select_window(steps, run.window.micro_batches)
    measured = [step for step in steps if step.stage == "window"]
    pauses_s = [step.excluded_s for step in measured if step.excluded_s]
    window.steps_sum_s = math.fsum(step.step_s or 0.0 for step in measured)
    window.excluded_s, window.excluded_count = math.fsum(pauses_s), len(pauses_s)
    window.skipped_count, window.short_count = selected.skipped_count, selected.short_count
    if raw_wall_s is not None:
        window.wall_s = raw_wall_s - window.excluded_s
        window.identity_error_fraction = (window.steps_sum_s - window.wall_s) / window.wall_s
    run.phases = summarize_steps(steps)
    # Skipped steps have no update to describe.
    updated = [step for step in measured if not step.is_skipped]
    series = {name: _known(updated, name) for name in SCALARS}
    run.scalars = ScalarMeans(**{name: statistics.fmean(values) for name, values in series.items() if values})
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
    run.per_rank = ranks
    for facts, name, join in (
        (run.window, "tokens", sum),
        (run.memory, "run_peak_allocated_bytes", max),
        (run.memory, "steady_peak_allocated_bytes", max),
        (run.device_state, "energy_j", sum),
    ):
        values = [getattr(rank, name) for rank in ranks]
        setattr(facts, name, None if None in values else join(values))
    if run.window.tokens is not None and run.data_parallel_size is not None:
        # Ranks that compute a batch together have all counted it.
        run.window.tokens = run.window.tokens * run.data_parallel_size // len(ranks)


def late_rank(run: RunRecord) -> tuple[int, str, float] | None:
    """The rank that the others wait for, the phase that it takes longer in, and how long they wait for it (s per step).

    Ranks meet in collectives: whoever is later by its own work before one, the others wait for there, and the steps of
    all are alike. Told by phases that hold no collective; where one holds work and collectives all ranks look alike,
    and only their traces tell. None where nobody waits for 2 % of the step, or nobody knows.
    """
    ranks = [rank for rank in run.per_rank or () if "step" in rank.mean_s]
    meets_late = run.config is not None and value_at(run, "config.trainer.strategy") == "ddp"
    phases = ("data", "transfer", "forward") if meets_late else ("data", "transfer")
    if len(ranks) < 2:
        return None
    times_s = np.array([[rank.mean_s.get(phase, 0.0) for phase in phases] for rank in ranks])
    late = int(times_s.sum(axis=1).argmax())
    delays_s = times_s[late] - np.delete(times_s, late, axis=0).mean(axis=0)
    steps_s, wait_s = [rank.mean_s["step"] for rank in ranks], float(delays_s.sum())
    if max(steps_s) - min(steps_s) > wait_s / 2 or wait_s < 0.02 * max(steps_s):
        return None
    return ranks[late].rank, phases[int(delays_s.argmax())], wait_s


def _throughput(run: RunRecord) -> Throughput:
    """Rates of the window: its tokens over its own wall time, pauses subtracted; never from a multiple of a median.

    Without a datasheet peak for the device and the precision there is no MFU, never a guess.
    """
    tokens, wall_s, energy_j, flops = run.window.tokens, run.window.wall_s, run.device_state.energy_j, run.flops
    rate = tokens / wall_s if tokens and wall_s else None
    # Of several ranks each has a device with that peak.
    share = rate / flops.peak_flops_per_s / (run.world_size or 1) if rate and flops.peak_flops_per_s else None
    per_token, again = flops.per_token_flops, flops.recomputed_per_token_flops
    reason = run.window.tokens_reason or (None if rate else "tokens per batch unknown")
    if flops.peak_flops_per_s is None:
        gpu = run.environment and run.environment.gpu.name
        reason = f"no datasheet peak known for {gpu or run.device_type} in {run.precision}"
    elif per_token is None:
        reason = flops.reason or "the module does not tell its FLOPs"

    def product(factor: float | None, count: int | None) -> float | None:
        return None if factor is None or count is None else factor * count

    return Throughput(
        tokens_per_s=rate,
        model_flops_per_s=product(rate, per_token),
        mfu_fraction=product(share, per_token),
        mfu_causal_fraction=product(share, flops.causal_per_token_flops),
        hfu_fraction=product(share, None if per_token is None or again is None else per_token + again),
        mfu_reason=reason,
        joules_per_token=energy_j / tokens if energy_j is not None and rate and tokens else None,
    )


def host_bound_fraction(run: RunRecord) -> float | None:
    """Share of the step in phases in which the device waited for the host, by the lag probes; None without them."""
    if not run.probe.verdicts or run.probe.verdicts == PerPhase():
        return None
    bound = [span for span, lag in run.probe.verdicts.items() if lag.verdict == "host-bound" and span != "step"]
    return math.fsum(summary.share_fraction or 0.0 for span, summary in run.phases.items() if span in bound)


def summarize_steps(records: Iterable[StepRecord]) -> PerPhase[PhaseSummary]:
    """Statistics of the step and of every phase that was seen, over the steps that `select_window` keeps."""
    steps = select_window(records).used
    phases: PerPhase[PhaseSummary] = PerPhase()
    for span in SPANS:
        values, hosts = _known(steps, f"{span}_s"), _known(steps, f"{span}_host_s")
        if not values:
            continue
        summary = summarize(values)
        phases.set(span, summary)
        step_mean_s = phases.step and phases.step.mean_s
        summary.share_fraction = summary.mean_s / step_mean_s if summary.mean_s is not None and step_mean_s else None
        if hosts:
            summary.host = HostSpan(statistics.fmean(hosts), min(hosts), statistics.median(hosts), max(hosts))
        if span != "other":
            lags = _known(steps, f"lag_{span}_s")
            summary.lag = Lag(min(lags), statistics.median(lags), max(lags)) if lags else Lag()
    return phases


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
    mean, median = statistics.fmean(values), float(np.median(series))
    std = sample_std(values)
    low, high, coverage = median_interval(np.sort(series).tolist()) or (None, None, None)
    drift, chance = trend(values) or (None, None)
    quantiles: dict[str, Any] = {
        name: float(np.quantile(series, share)) for name, (share, least) in _QUANTILES.items() if n >= least
    }
    return PhaseSummary(
        n=n,
        mean_s=mean,
        std_s=std,
        **quantiles,
        cv_fraction=std / mean if std is not None and mean > 0 else None,
        median_low_s=low,
        median_high_s=high,
        median_coverage_fraction=coverage,
        lag1_autocorrelation=lag1_autocorrelation(values),
        outlier_count=outlier_count(values, median),
        trend_fraction=drift,
        trend_p=chance,
    )


def _known(steps: Iterable[StepRecord], name: str) -> list[float]:
    """The values that steps have of a field."""
    return [value for step in steps if (value := getattr(step, name)) is not None]
