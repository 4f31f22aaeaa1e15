"""The summary of a run, computed from its steps: statistics of each phase over the window, rates and guards."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec.structs import replace

from lmbench.records.field import PerPhase, mean_of
from lmbench.records.guards import evaluate_guards, rules
from lmbench.records.measured import Guard, HostSpan, Lag, PhaseSummary, RankRecord, Status, Throughput
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
from lmbench.records.statistics import (
    lag1_autocorrelation,
    median_interval,
    outlier_count,
    sample_std,
    trend,
    trimean,
)
from lmbench.records.step import GRADIENT_NORM, StepRecord, select_window, values_of
from lmbench.records.trends import changes_of, growth_of, saving_of
from lmbench.records.vocabulary import SPANS, Values

#: Quantiles of a summary: the share of values below, and the least number of values.
_QUANTILES = {
    "min_s": (0, 1), "p5_s": (0.05, 20), "p25_s": (0.25, 1), "median_s": (0.5, 1), "p75_s": (0.75, 1),
    "p95_s": (0.95, 20), "p99_s": (0.99, 100), "max_s": (1, 1),
}  # fmt: skip


def complete_run(run: RunRecord, steps: Sequence[StepRecord], raw_wall_s: float | None = None) -> None:
    """Fill in, in place, the parts of a run's record that follow from its facts and its steps.

    Args:
        steps: records of the stages warm-up and window.
        raw_wall_s: the window's wall time including its pauses; None where no window was completed. Its steps are then
            counted here, since a signal may come between the end of a step and its record.
    """
    window, used = run.window, select_window(steps)
    measured = [step for step in steps if step.stage == "window"]
    window.steps_sum_s = math.fsum(values_of(measured, "step_s"))
    window.excluded_s = math.fsum(values_of(measured, "excluded_s"))
    window.skipped_count = sum(bool(step.is_skipped) for step in measured)
    window.short_count = len(measured) - window.skipped_count - len(used)
    # All steps of a turn count: 6 and 11 differences of `large_bf16` with itself on H200s spread by 0.24 and 0.69 %;
    # without the first step, which finds an idle device, by 0.56 and 1.74 % (2026-11-28, torch 2.11).
    turns: dict[int | None, list[float]] = {}
    for step in used:
        turns.setdefault(step.turn, []).append(step.step_s or math.nan)
    # A turn whose steps were all skipped would shift the turns after it.
    is_complete = turns and [*turns] == [*range(len(turns))]
    quartiles = [np.quantile(times_s, (0.25, 0.5, 0.75)).tolist() for times_s in turns.values()]
    window.turn_steps_s = [trimean(*of_turn) for of_turn in quartiles] if is_complete else None
    if raw_wall_s is None:
        window.steps = len(measured)
    else:
        # The steps leave out the pauses, and the wall time is compared with their sum.
        window.wall_s = raw_wall_s - window.excluded_s
        window.identity_error_fraction = (window.steps_sum_s - window.wall_s) / window.wall_s
        window.goodput_fraction = window.wall_s / raw_wall_s
    restarts_s = [step.data_s or 0.0 for step in measured if step.follows_loader_end]
    window.loader_end_count = len(restarts_s)
    if restarts_s:
        usual_s = [step.data_s or 0.0 for step in measured if not step.follows_loader_end]
        window.loader_restart_s = max(0.0, statistics.fmean(restarts_s) - statistics.median(usual_s or [0.0]))
    window.checkpoint_s = math.fsum(values_of(measured, "checkpoint_s"))
    window.validation_s = math.fsum(values_of(measured, "validation_s"))
    timed = [step for step in measured if (step.step_s or 0.0) > 0]
    window.changes = changes_of(timed)
    run.memory.host_growth = growth_of(measured, "host_bytes")
    run.memory.reserved_growth = growth_of(measured, "reserved_bytes")
    saving_of(timed, run.saving)
    run.phases = summarize_steps(steps)
    # A nan or an infinity is kept, because it shows that the run diverged.
    if losses := values_of(steps, "loss"):
        run.loss.first = losses[0]
    if losses := values_of(measured, "loss"):
        run.loss.last, run.loss.mean = losses[-1], mean_of(losses)
    run.scalars = _scalar_means([step for step in measured if not step.is_skipped])
    run.throughput = _throughput(run)
    # Guards that observers added follow lmbench's own, which a record that is completed again has already.
    guards = [*evaluate_guards(run, steps), *(guard for guard in run.guards if guard.name not in rules())]
    run.guards = [_worst_of_ranks(guard, run.per_rank or ()) for guard in guards]
    run.throughput.refuse_impossible()


def _scalar_means(updates: Sequence[StepRecord]) -> dict[str, float | None]:
    """Means of the logged scalars over steps with an update, which is what scalars describe."""
    series = defaultdict[str, list[float]](list)
    for step in updates:
        for name, value in ({GRADIENT_NORM: step.gradient_norm} | step.scalars).items():
            if value is not None:
                series[name].append(value)
    if series.get("loss") == values_of(updates, "loss"):
        # The module has logged its loss under this name.
        del series["loss"]
    return {name: mean_of(values) for name, values in series.items()}


def rank_record(run: RunRecord) -> RankRecord:
    """Figures of this rank's window, of its completed record, for the record of all ranks."""
    environment = run.environment
    return RankRecord(
        run.rank or 0,
        environment.host.hostname,
        environment.gpu.uuid,
        run.window.steps,
        run.window.tokens,
        {span: summary.mean_s for span, summary in run.phases.items() if summary.mean_s is not None},
        run.memory.run_peak_allocated_bytes,
        run.memory.steady_peak_allocated_bytes,
        run.device_state.energy_j,
        # Steps of ranks take equally long.
        [guard for guard in run.guards if _SEVERITY[guard.status] and guard.name not in ("trend", "spread")],
    )


#: How bad a guard's status is; 0 where nothing has to be said.
_SEVERITY: dict[Status, int] = {"n/a": 0, "pass": 0, "warn": 1, "fail": 2}


def _worst_of_ranks(guard: Guard, ranks: Iterable[RankRecord]) -> Guard:
    """The guard of the record's own rank, or of another rank where its status, or the figure of a failure, is worse."""
    for rank in ranks:
        for other in rank.guards:
            status, own = _SEVERITY[other.status], _SEVERITY[guard.status]
            is_further = status == own == _SEVERITY["fail"] and (other.value or 0) > (guard.value or 0)
            if other.name == guard.name and (status > own or is_further):
                guard = replace(other, message=f"rank {rank.rank}: {other.message}")
    return guard


def join_ranks(run: RunRecord, ranks: list[RankRecord]) -> None:
    """Turn the record of one rank into that of all ranks: sums of tokens and energy, maxima of memory."""
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
        # Every rank of a group that computes a batch together counted the batch's tokens.
        run.window.tokens = run.window.tokens * run.data_parallel_size // len(ranks)


def late_rank(run: RunRecord) -> tuple[int, str, float] | None:
    """The rank that the others wait for, its slow phase, and how long they wait for it, in s per step.

    Ranks meet in collectives, where all wait for the slowest; so their steps take equally long. A rank is late if it
    needs longer than the others in phases without a collective. In a phase with work and collectives all ranks look
    alike, and only their traces can tell. None where the others wait for less than 2 % of the step, or where the
    delay is unknown.
    """
    ranks = [rank for rank in run.per_rank or () if "step" in rank.mean_s]
    if len(ranks) < 2:
        return None
    # Under DDP ranks wait for each other in the backward pass, under other strategies already in the forward pass.
    # lmbench's NaiveDDP and its like do without DistributedDataParallel, which has buckets.
    strategy = str(value_at(run, "config.trainer.strategy.class_path"))
    is_ddp = run.communication.bucket_copy_bytes is not None or strategy.endswith("DDP")
    phases = ("data", "transfer", "forward") if is_ddp else ("data", "transfer")
    late = max(ranks, key=lambda rank: sum(rank.mean_s.get(phase, 0.0) for phase in phases))
    others = [rank.mean_s for rank in ranks if rank is not late]
    delays_s = {
        phase: late.mean_s.get(phase, 0.0) - statistics.fmean(means_s.get(phase, 0.0) for means_s in others)
        for phase in phases
    }
    steps_s, wait_s = [rank.mean_s["step"] for rank in ranks], sum(delays_s.values())
    if max(steps_s) - min(steps_s) > wait_s / 2 or wait_s < 0.02 * max(steps_s):
        return None
    return late.rank, max(delays_s, key=delays_s.__getitem__), wait_s


def _throughput(run: RunRecord) -> Throughput:
    """Rates of the window: its tokens divided by its wall time without pauses.

    MFU is null, never a guess, where the datasheet peak for the device and the precision is unknown.
    """
    tokens, wall_s, energy_j, flops = run.window.tokens, run.window.wall_s, run.device_state.energy_j, run.flops
    rate = tokens / wall_s if tokens and wall_s else None
    price = value_at(run, "config.measure.price_per_hour")
    # Share of the peak for each FLOP per token. Each rank has a device with this peak.
    per_flop = rate / flops.peak_flops_per_s / run.rank_count if rate and flops.peak_flops_per_s else None
    per_token, recomputed = flops.per_token_flops, flops.recomputed_per_token_flops
    reason = run.window.tokens_reason or (None if rate else "tokens per batch unknown")
    if flops.peak_flops_per_s is None:
        gpu = run.environment.gpu.name
        weights = f" with parameters in {run.model.dtype}" if run.model.dtype else ""
        reason = f"no datasheet peak known for {gpu or run.device_type} in {run.precision}{weights}"
    elif per_token is None:
        reason = flops.reason or "the module does not tell its FLOPs"

    def product(factor: float | None, count: int | None) -> float | None:
        return None if factor is None or count is None else factor * count

    return Throughput(
        tokens_per_s=rate,
        model_flops_per_s=product(rate, per_token),
        mfu_fraction=product(per_flop, per_token),
        mfu_causal_fraction=product(per_flop, flops.causal_per_token_flops),
        hfu_fraction=product(per_flop, None if per_token is None or recomputed is None else per_token + recomputed),
        mfu_reason=reason,
        joules_per_token=energy_j / tokens if energy_j is not None and rate and tokens else None,
        price_per_token=price / 3600 * run.rank_count / rate if price and rate else None,
    )


def host_bound_fraction(run: RunRecord) -> float | None:
    """Share of the step in phases whose lag verdict is `host-bound`; None without verdicts."""
    if not run.probe.lags:
        return None
    bound = run.probe.host_bound
    return math.fsum(summary.share_fraction or 0.0 for span, summary in run.phases.items() if span in bound)


def summarize_steps(records: Iterable[StepRecord]) -> PerPhase[PhaseSummary]:
    """Statistics of the step and of every phase that was seen, over the steps that `select_window` selects."""
    steps = select_window(records)
    phases: PerPhase[PhaseSummary] = PerPhase()
    for span in SPANS:
        values, host_values = values_of(steps, f"{span}_s"), values_of(steps, f"{span}_host_s")
        if not values:
            continue
        if span != "step":
            # Phases sum to the step, also where only some steps have an update.
            values = [getattr(step, f"{span}_s") or 0.0 for step in steps]
            host_values = host_values and [getattr(step, f"{span}_host_s") or 0.0 for step in steps]
        summary = summarize(values)
        phases.set(span, summary)
        step_mean_s = phases.step and phases.step.mean_s
        summary.share_fraction = summary.mean_s / step_mean_s if summary.mean_s is not None and step_mean_s else None
        if host_values:
            summary.host = HostSpan(
                statistics.fmean(host_values), min(host_values), statistics.median(host_values), max(host_values)
            )
        if span != "other":
            lags = values_of(steps, f"lag_{span}_s")
            summary.lag = Lag(min(lags), statistics.median(lags), max(lags)) if lags else Lag()
    return phases


def summarize(values: Sequence[float]) -> PhaseSummary:
    """Statistics of one series of seconds in the order of measurement.

    A statistic is None where the series is too short for it: std below 2 values, autocorrelation below 3, trend and the
    median's interval below 6, p5 and p95 below 20, p99 below 100.

    Raises:
        ValueError: a value is not finite.
    """
    series, n = np.asarray(values, dtype=float), len(values)
    if not np.isfinite(series).all():
        raise ValueError("a series with a non-finite value has no summary")
    if not n:
        return PhaseSummary(n=0)
    mean, std = statistics.fmean(values), sample_std(values)
    low, high, coverage = median_interval(np.sort(series).tolist()) or (None, None, None)
    drift, p = trend(values) or (None, None)
    quantiles: Values = {
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
        outlier_count=outlier_count(values),
        trend_fraction=drift,
        trend_p=p,
    )
