"""What follows from a run's steps: statistics of each phase over the window, rates, guards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from lmbench.records.field import PerPhase
from lmbench.records.guards import evaluate_guards
from lmbench.records.measured import HostSpan, Lag, PhaseSummary, Throughput, Window
from lmbench.records.run import Flops, RunRecord
from lmbench.records.statistics import (
    lag1_autocorrelation,
    median_interval,
    outlier_count,
    quantile,
    sample_std,
    trend,
)
from lmbench.records.step import SCALARS, ScalarMeans, StepRecord, select_window
from lmbench.records.vocabulary import BORDERS, PHASES, SPANS, Span


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
    rate, peak, energy_j = tokens / wall_s, flops.peak_flops_per_s, run.device_state.energy_j
    return Throughput(
        tokens_per_s=rate,
        model_flops_per_s=_times(rate, flops.per_token_flops),
        mfu_fraction=_times(rate / peak, flops.per_token_flops) if peak else None,
        mfu_causal_fraction=_times(rate / peak, flops.causal_per_token_flops) if peak else None,
        hfu_fraction=_times(rate / peak, _hardware_flops(flops)) if peak else None,
        mfu_reason=reason,
        joules_per_token=None if energy_j is None else energy_j / tokens,
    )


def _hardware_flops(flops: Flops) -> int | None:
    if flops.per_token_flops is None or flops.recomputed_per_token_flops is None:
        return None
    return flops.per_token_flops + flops.recomputed_per_token_flops


def _times(factor: float, value: int | None) -> float | None:
    return None if value is None else factor * value


def _why_no_mfu(run: RunRecord) -> str | None:
    if run.flops.peak_flops_per_s is None:
        gpu = run.environment.gpu.name if run.environment else None
        return f"no datasheet peak known for {gpu or run.device_type} in {run.precision}"
    if run.flops.per_token_flops is None:
        return run.flops.reason or "the module does not tell its FLOPs"
    return run.window.tokens_reason


def host_bound_fraction(run: RunRecord) -> float | None:
    """Share of the step in phases in which the device waited for the host, by the lag probes; None without them."""
    verdicts = run.probe.verdicts
    if verdicts is None or not any(True for _ in verdicts.items()):
        return None
    bound = [span for span, found in verdicts.items() if found.verdict == "host-bound" and span in PHASES]
    summaries = [run.phases.get(span) for span in bound]
    return math.fsum(summary.share_fraction or 0.0 for summary in summaries if summary is not None)


def summarize_steps(records: Iterable[StepRecord], micro_batches: int | None = None) -> PerPhase[PhaseSummary]:
    """Statistics of the step and of every phase that was seen, over the steps that `select_window` keeps."""
    steps = select_window(records, micro_batches).used
    found: PerPhase[PhaseSummary] = PerPhase()
    step_mean_s: float | None = None
    for span in SPANS:
        values = _known(step.span_s(span) for step in steps)
        if not values:
            continue
        summary = summarize(values)
        step_mean_s = summary.mean_s if span == "step" else step_mean_s
        summary.share_fraction = summary.mean_s / step_mean_s if summary.mean_s is not None and step_mean_s else None
        summary.host = _host_span(_known(step.host_s(span) for step in steps))
        summary.lag = _lag(steps, span)
        found.set(span, summary)
    return found


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
    if not all(math.isfinite(value) for value in values):
        raise ValueError("a series with a non-finite value has no summary")
    if not values:
        return PhaseSummary(n=0)
    ordered = sorted(values)
    n, mean, median = len(ordered), statistics.fmean(ordered), quantile(ordered, 0.5)
    std = sample_std(ordered, mean)
    found = PhaseSummary(
        n=n,
        mean_s=mean,
        std_s=std,
        min_s=ordered[0],
        p25_s=quantile(ordered, 0.25),
        median_s=median,
        p75_s=quantile(ordered, 0.75),
        max_s=ordered[-1],
        cv_fraction=std / mean if std is not None and mean > 0 else None,
        lag1_autocorrelation=lag1_autocorrelation(values, mean),
        outlier_count=outlier_count(values, median),
    )
    if n >= 20:
        found.p5_s, found.p95_s = quantile(ordered, 0.05), quantile(ordered, 0.95)
    if n >= 100:
        found.p99_s = quantile(ordered, 0.99)
    if (interval := median_interval(ordered)) is not None:
        found.median_low_s, found.median_high_s, found.median_coverage_fraction = interval
    if (drift := trend(values)) is not None:
        found.trend_fraction = drift[0] / median if median > 0 else None
        found.trend_p = drift[1]
    return found


def _host_span(values: list[float]) -> HostSpan:
    if not values:
        return HostSpan()
    return HostSpan(statistics.fmean(values), min(values), statistics.median(values), max(values))


def _lag(steps: Sequence[StepRecord], span: Span) -> Lag | None:
    border = next((border for border in BORDERS if border == span), None)
    if border is None:
        return None
    values = _known(step.lag_s(border) for step in steps)
    return Lag(min(values), statistics.median(values), max(values)) if values else Lag()


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
