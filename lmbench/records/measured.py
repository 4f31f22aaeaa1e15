# ruff: noqa: E501 (tables, one field a line)
"""What a run measured: window, phases, rates, memory, device state, probe steps."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from lmbench.records.field import (
    Bytes,
    Celsius,
    Count,
    Flag,
    FlopsPerSecond,
    Fraction,
    Hertz,
    Index,
    Joules,
    Nats,
    Number,
    PerPhase,
    PhaseBytes,
    Seconds,
    Text,
    Watts,
    part,
)
from lmbench.records.vocabulary import INCORRECT

LagWord = Literal["host-bound", "queued", "mixed"]


class Window(Struct):
    """Window: the steps between two synchronizes.

    Attributes:
        warmup_steps: warm-up. Steps before the window.
        requested_steps: steps asked for. Steps the window was to have at least; null until training ends.
        requested_s: time asked for. Seconds the window was to last at least.
        steps: steps. Steps in the window, skipped and short ones included.
        first_step: first step. Index of the window's first step.
        micro_batches: micro-batches. Micro-batches of a full step.
        skipped_count: skipped (lower is better). Steps the fp16 scaler skipped; in no statistic.
        short_count: short. Steps with fewer micro-batches than a full one; in no statistic.
        tokens: tokens. Tokens of all steps, micro-batches and ranks.
        tokens_reason: no tokens because. Why `tokens` is not known, where it is not.
        wall_s: wall. Wall time between the two synchronizes, `excluded_s` subtracted; clocked apart from the steps.
        steps_sum_s: sum of steps. Sum of `step_s` over the window.
        excluded_s: excluded. Validation, checkpoints and record writing within the window, already subtracted.
        excluded_count: exclusions. How often that happened.
        clock_drift_fraction: clock drift. How much faster the device's clock ran than the host's; corrected in the lags.
        identity_error_fraction: identity error. Signed: (`steps_sum_s` - `wall_s`) / `wall_s`.
    """

    warmup_steps: Count = None
    requested_steps: Count = None
    requested_s: Seconds = None
    steps: Count = None
    first_step: Index = None
    micro_batches: Count = None
    skipped_count: Count = None
    short_count: Count = None
    tokens: Count = None
    tokens_reason: Text = None
    wall_s: Seconds = None
    steps_sum_s: Seconds = None
    excluded_s: Seconds = None
    excluded_count: Count = None
    clock_drift_fraction: Fraction = None
    identity_error_fraction: Fraction = None


class Warmup(Struct):
    """Window: what the warm-up showed.

    Attributes:
        gradient_norm: warm-up gradient norm. 2-norm of all gradients at the last warm-up step, before clipping: the same step whatever the window.
    """

    gradient_norm: Number = None


class HostSpan(Struct):
    """Phases: host spans.

    Attributes:
        mean_s: host mean (lower is better). Mean host span of <phase>.
        min_s: host min (lower is better). Smallest host span.
        median_s: host median (lower is better). Median host span.
        max_s: host max (lower is better). Largest host span.
    """

    mean_s: Seconds = None
    min_s: Seconds = None
    median_s: Seconds = None
    max_s: Seconds = None


class Lag(Struct):
    """Phases: lags.

    Attributes:
        min_s: lag min. Smallest lag at the end of <phase>.
        median_s: lag median. Median lag at the end of <phase>.
        max_s: lag max. Largest lag at the end of <phase>.
    """

    min_s: Seconds = None
    median_s: Seconds = None
    max_s: Seconds = None


class PhaseSummary(Struct):
    """Phases: statistics of one phase, or of the step, over the window's full and unskipped steps.

    Attributes:
        n: n. Steps behind the statistics of <phase>: in the window, full, not skipped.
        mean_s: mean (lower is better). Mean device span of <phase>.
        std_s: std (lower is better). Sample standard deviation (n - 1).
        min_s: min (lower is better). Smallest value.
        p5_s: p5 (lower is better). 5th percentile, from 20 steps on.
        p25_s: p25 (lower is better). 25th percentile, linear between order statistics.
        median_s: median (lower is better). Median.
        p75_s: p75 (lower is better). 75th percentile.
        p95_s: p95 (lower is better). 95th percentile, from 20 steps on.
        p99_s: p99 (lower is better). 99th percentile, from 100 steps on.
        max_s: max (lower is better). Largest value.
        cv_fraction: CV (lower is better). Standard deviation divided by the mean.
        median_low_s: median low. Lower end of the median's interval within this run (order statistics, 6 steps on).
        median_high_s: median high. Upper end of that interval.
        median_coverage_fraction: coverage. That interval's real coverage, at least 0.95, if steps are independent.
        lag1_autocorrelation: autocorrelation. Correlation of a step with the next one.
        outlier_count: outliers (lower is better). Values over 3.5 robust deviations (from the MAD) off the median.
        trend_fraction: trend. Drift over the window by Theil and Sen's line, within what the steps span, as a fraction of where it begins.
        trend_p: trend p. How likely such an order of values is without a trend (Kendall).
        share_fraction: share. Mean of <phase> divided by the mean step.
    """

    n: Count = None
    mean_s: Seconds = None
    std_s: Seconds = None
    min_s: Seconds = None
    p5_s: Seconds = None
    p25_s: Seconds = None
    median_s: Seconds = None
    p75_s: Seconds = None
    p95_s: Seconds = None
    p99_s: Seconds = None
    max_s: Seconds = None
    cv_fraction: Fraction = None
    median_low_s: Seconds = None
    median_high_s: Seconds = None
    median_coverage_fraction: Fraction = None
    lag1_autocorrelation: Number = None
    outlier_count: Count = None
    trend_fraction: Fraction = None
    trend_p: Number = None
    share_fraction: Fraction = None
    host: HostSpan = part(HostSpan)
    lag: Lag | None = None


class Throughput(Struct):
    """Throughput: rates of the window.

    Attributes:
        tokens_per_s: tokens/s (higher is better). `window.tokens` / `window.wall_s`.
        model_flops_per_s: model FLOP/s (higher is better). Tokens/s times model FLOPs per token.
        mfu_fraction: MFU (higher is better). Model FLOP/s of one device over its peak, attention counted full.
        mfu_causal_fraction: causal MFU (higher is better). Share of the device's peak that the model's FLOPs took, causal attention counted half.
        hfu_fraction: HFU (higher is better). Hardware FLOP/s over the peak: model FLOPs and those that activation checkpointing computes again.
        mfu_reason: no MFU because. Why there is no MFU, null where there is one.
        joules_per_token: J/token (lower is better). `device_state.energy_j` / `window.tokens`.
    """

    tokens_per_s: Annotated[float | None, "tokens/s"] = None
    model_flops_per_s: FlopsPerSecond = None
    mfu_fraction: Fraction = None
    mfu_causal_fraction: Fraction = None
    hfu_fraction: Fraction = None
    mfu_reason: Text = None
    joules_per_token: Annotated[float | None, "J/token"] = None


class Loss(Struct):
    """Throughput: losses.

    Attributes:
        first: first loss (lower is better). Loss of step 0, warm-up included.
        last: last loss (lower is better). Loss of the window's last step.
        mean: mean loss (lower is better). Mean loss over the window.
        perplexity: perplexity (lower is better). exp(`loss.mean`).
    """

    first: Nats = None
    last: Nats = None
    mean: Nats = None
    perplexity: Number = None


class RankRecord(Struct):
    """What one of several ranks measured in the window; `mean_s` has the means of its step and of its phases."""

    rank: int
    hostname: Text = None
    gpu_uuid: Text = None
    steps: Count = None
    tokens: Count = None
    mean_s: dict[str, float] = {}
    run_peak_allocated_bytes: Bytes = None
    steady_peak_allocated_bytes: Bytes = None
    energy_j: Joules = None


class RefusedAllocation(Struct):
    """Memory: what the device held when it had no room for one more tensor.

    Attributes:
        phase: refused in. Phase in which the allocator was refused.
        requested_bytes: refused (lower is better). Bytes asked for, as the allocator rounds them.
        allocated_bytes: held (lower is better). Allocated on the device when the allocator was refused.
        reserved_bytes: reserved then (lower is better). Reserved by the allocator when it was refused.
        device_free_bytes: free then (higher is better). Free on the device, held by nobody, when the allocator was refused.
        parameters_bytes: parameters held (lower is better). Of `allocated_bytes`: parameters and buffers.
        gradients_bytes: gradients held (lower is better). Of `allocated_bytes`: gradients of parameters.
        optimizer_state_bytes: optimizer state held (lower is better). Of `allocated_bytes`: state of the optimizers.
        rest_bytes: activations and the rest (lower is better). What remains of `allocated_bytes`: activations, inputs, temporaries, workspaces.
    """

    phase: Text = None
    requested_bytes: Bytes = None
    allocated_bytes: Bytes = None
    reserved_bytes: Bytes = None
    device_free_bytes: Bytes = None
    parameters_bytes: Bytes = None
    gradients_bytes: Bytes = None
    optimizer_state_bytes: Bytes = None
    rest_bytes: Bytes = None


class Memory(Struct):
    """Memory: peaks of the allocator and of the process.

    Attributes:
        run_peak_allocated_bytes: run peak (lower is better). Peak allocated on the device over the whole run (decides what fits).
        run_peak_reserved_bytes: run peak reserved (lower is better). Peak reserved by the allocator over the whole run.
        steady_peak_allocated_bytes: steady peak (lower is better). Peak allocated within the window.
        steady_peak_reserved_bytes: steady peak reserved (lower is better). Peak reserved within the window.
        phase_peak_allocated_bytes: peak in <phase> (lower is better). Peak allocated in <phase>, from the probe steps.
        phase_begin_allocated_bytes: before <phase> (lower is better). Allocated when <phase> begins, from the probe steps: before backward, what forward keeps for it is in it.
        saved_bytes: saved (lower is better). What autograd saves in one forward of attention by itself, besides its inputs: tensors counted where it saves them, each storage once.
        expected_saved_bytes: saved by shape (lower is better). What eager attention saves in one forward by its shape: softmax's result if written out, output and logsumexp if fused; null where nobody knows.
        device_total_bytes: device total. Memory of the device.
        run_alloc_retry_count: retries (lower is better). Allocations that worked only after the cache was emptied.
        window_alloc_retry_count: retries in window (lower is better). Allocations in the window that worked only after the cache was emptied.
        window_reserved_growth_bytes: growth (lower is better). What the allocator reserved more at the window's end than at its start.
        host_peak_rss_bytes: host peak (lower is better). Peak resident memory of the process.
    """

    run_peak_allocated_bytes: Bytes = None
    run_peak_reserved_bytes: Bytes = None
    steady_peak_allocated_bytes: Bytes = None
    steady_peak_reserved_bytes: Bytes = None
    phase_peak_allocated_bytes: PhaseBytes = None
    phase_begin_allocated_bytes: PhaseBytes = None
    saved_bytes: Bytes = None
    expected_saved_bytes: Bytes = None
    device_total_bytes: Bytes = None
    run_alloc_retry_count: Count = None
    window_alloc_retry_count: Count = None
    window_reserved_growth_bytes: Bytes = None
    refused: RefusedAllocation | None = None
    host_peak_rss_bytes: Bytes = None


class DeviceReading(Struct):
    """Device state: one reading by NVML.

    Attributes:
        read_at_s: read at. Monotonic clock at the reading.
        sm_clock_hz: SM clock. SM clock at the window's <end>.
        memory_clock_hz: memory clock. Clock of the device's memory at the window's <end>.
        temperature_c: temperature. Temperature of the GPU at the window's <end>.
        power_w: power. Power draw at the window's <end>.
        energy_j: energy counter. Energy since the driver was loaded.
        power_capped_s: power-capped. Counter of the time that the power cap held the clock down.
        thermal_capped_s: thermal-capped. Counter of the time that the temperature held the clock down.
        throttle_reasons: throttle reasons. What holds the clock at this moment.
        memory_used_bytes: used. Memory used on the device by all processes.
        other_process_pids: other pids. Other processes on the GPU, where the driver shows them.
        other_process_count: other processes. Number of other processes on the GPU; null where the driver hides them.
    """

    read_at_s: Seconds = None
    sm_clock_hz: Hertz = None
    memory_clock_hz: Hertz = None
    temperature_c: Celsius = None
    power_w: Watts = None
    energy_j: Joules = None
    power_capped_s: Seconds = None
    thermal_capped_s: Seconds = None
    throttle_reasons: list[str] | None = None
    memory_used_bytes: Bytes = None
    other_process_pids: list[int] | None = None
    other_process_count: Count = None


class DeviceState(Struct):
    """Device state: what two readings say of the window between them.

    Attributes:
        mean_power_w: power (lower is better). Mean power between the two readings, from the energy counter.
        mean_temperature_c: mean temperature (lower is better). Mean of the temperatures at the window's two ends: reading it in between would cost time in the window.
        energy_j: energy (lower is better). Mean power times `window.wall_s`.
        power_capped_fraction: power-capped (lower is better). Share of the time that the power cap held the clock down.
        thermal_capped_fraction: thermal-capped (lower is better). Share of the time that the temperature held the clock down.
        sm_clock_drop_fraction: clock drop (lower is better). SM clock lost from the window's start to its end.
        other_process_count: other processes (lower is better). Other processes on the GPU, the larger of both readings.
    """

    open: Annotated[DeviceReading, "<end>"] = part(DeviceReading)
    close: Annotated[DeviceReading, "<end>"] = part(DeviceReading)
    mean_power_w: Watts = None
    mean_temperature_c: Celsius = None
    energy_j: Joules = None
    power_capped_fraction: Fraction = None
    thermal_capped_fraction: Fraction = None
    sm_clock_drop_fraction: Fraction = None
    other_process_count: Count = None


class HostState(Struct):
    """Host state: what else the machine did in the window; null where the system does not tell.

    Attributes:
        load_per_core: load (lower is better). The machine's load of the last minute at the window's end, divided by its cores.
        other_cpu_fraction: other processes (lower is better). Share of the time of the cores this process may use that others (its children left out) took in the window.
        steal_fraction: steal (lower is better). Share of the cores' time in the window that the hypervisor gave to other machines.
        waited_fraction: waited for a core (lower is better). Share of the window in which the training thread could have run and had no core.
    """

    load_per_core: Number = None
    other_cpu_fraction: Fraction = None
    steal_fraction: Fraction = None
    waited_fraction: Fraction = None


class LagVerdict(Struct):
    """Probe steps: whether a phase waits for the host.

    Attributes:
        verdict: <phase> verdict. `host-bound`, `queued` or `mixed`, by the smallest lag within <phase>.
        min_lag_s: <phase> min lag. Median over probe steps of the smallest lag within <phase>.
        agree_fraction: <phase> agreement. Share of probe steps that gave the verdict on <phase>.
        marks: <phase> marks. Marks within <phase> in one step.
    """

    verdict: Annotated[LagWord | None, "text"] = None
    min_lag_s: Seconds = None
    agree_fraction: Fraction = None
    marks: Count = None


class HiddenSync(Struct):
    """One place that made the host wait for the device."""

    location: str
    count: int
    stack: str


class TrainingFacts(Struct):
    """Probe steps: did it train?

    Attributes:
        parameters: checked. Trainable tensors that were checked; null if none were.
        missing_gradients: no gradient. Names of trainable tensors without a gradient.
        zero_gradients: zero gradient. Names of trainable tensors whose gradient is all zero.
        nonfinite_gradients: non-finite gradient. Names of trainable tensors whose gradient is not finite.
        unmoved_parameters: unmoved. Names of trainable tensors that the optimizer left as they were; null without one.
        gradient_norm: gradient norm. 2-norm of all gradients, before clipping.
        is_skipped: check skipped. The fp16 scaler skipped the checked step.
    """

    parameters: Count = None
    missing_gradients: list[str] = []
    zero_gradients: list[str] = []
    nonfinite_gradients: list[str] = []
    unmoved_parameters: list[str] | None = None
    gradient_norm: Number = None
    is_skipped: Flag = None


class RunError(Struct):
    """Run: what ended the run.

    Attributes:
        kind: error. Type of the exception that ended the run.
        message: error message. Message of the exception that ended the run, in one line.
        phase: error phase. Phase it happened in; `setup` before the first step, `recording` or `summary` for lmbench's own work.
        requested_bytes: asked. Bytes asked for when memory ran out, where the message says.
        where: where. `device` or `host`: whose memory ran out.
        location: line of yours. The last line of your own code that the exception came through: `my_module.py:31 in training_step`.
        traceback_file: traceback. All frames of the exception, in the result folder.
    """

    kind: Text = None
    message: Text = None
    phase: Text = None
    requested_bytes: Bytes = None
    where: Text = None
    location: Text = None
    traceback_file: Text = None

    @property
    def is_incorrect(self) -> bool:
        """Attention was found wrong, and so the run has no speed."""
        return (self.message or "").startswith(f"{INCORRECT}: ")


class Probe(Struct):
    """Probe steps: unmeasured steps after the window.

    Attributes:
        requested_steps: probe steps asked for. Steps that were to look at the lag.
        is_complete: probed. Every kind of probe step was taken.
        error: probe error. What ended the probe steps too soon, after a complete window: like `error`.
        steps: probe steps. Steps after the window that were probed; in no statistic.
        marked_modules: marked modules. Modules whose ends were marked in the probe steps.
        hidden_syncs: hidden syncs. Synchronizes found in a probe step: location, stack, count; null if not looked for.
    """

    requested_steps: Count = None
    is_complete: Flag = None
    error: RunError | None = None
    steps: Count = None
    marked_modules: Count = None
    hidden_syncs: list[HiddenSync] | None = None
    verdicts: PerPhase[LagVerdict] | None = None
    training: TrainingFacts | None = None
