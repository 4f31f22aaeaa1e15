# ruff: noqa: E501 (tables, one field a line)
"""The measured parts of a run's record: window, phases, rates, memory, device state, probe steps and guards.

The results of the other passes are here too: kernels of a trace, the allocator's history, a predicted peak, dtypes.
"""

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

Status = Literal["pass", "warn", "fail", "n/a"]

#: Name of the guard for other load on the machine. Its warning makes a comparison undecided, unless both sides were
#: measured in turn.
BUSY_MACHINE = "busy_machine"


class Guard(Struct, frozen=True):
    """The result of one check of the measurement.

    `value` and `limit` are in `unit`, and None where the check has no figure. `advice` is empty where the check passed.
    """

    name: str
    status: Status
    value: float | None = None
    limit: float | None = None
    unit: str = ""
    message: str = ""
    advice: str = ""


LagWord = Literal["host-bound", "queued", "mixed"]


class Window(Struct):
    """Window: the measured steps, between two synchronizations of host and device.

    Attributes:
        warmup_steps: warm-up. Steps before the window, which no statistic includes.
        requested_steps: steps asked for. Least number of steps that the window was to have; null where it was to last until training ends.
        requested_s: time asked for. Least time that the window was to last.
        steps: steps. Steps in the window, including those that were skipped and those with too few micro-batches.
        first_step: first step. Index of the window's first step.
        micro_batches: micro-batches. Micro-batches of a full step.
        skipped_count: skipped (lower is better). Steps of the window whose update was skipped (by the fp16 scaler, or without a loss); no statistic includes them.
        short_count: short. Steps of the window with fewer micro-batches than a full step; no statistic includes them.
        tokens: tokens. Tokens of all the window's steps, micro-batches and ranks.
        tokens_reason: no tokens because. Why `tokens` is null; null where it is known.
        wall_s: wall. Wall time between the two synchronizations, less `excluded_s`. Its clock is not the one that times the steps.
        steps_sum_s: sum of steps. Sum of `step_s` over all steps of the window.
        excluded_s: excluded. Time within the window for validation, checkpoints and writing records; already subtracted from `wall_s` and `step_s`.
        excluded_count: exclusions. Number of steps before which a pause (validation, a checkpoint, writing records) was subtracted.
        clock_drift_fraction: clock drift. How much faster the device's clock ran than the host's; lags are corrected for it.
        identity_error_fraction: identity error. Difference between the sum of the steps and the window, with its sign: (`steps_sum_s` - `wall_s`) / `wall_s`.
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

    @property
    def step_tokens(self) -> float | None:
        """Mean tokens of a step over all ranks; None where tokens are not counted."""
        return self.tokens / self.steps if self.tokens and self.steps else None


class Warmup(Struct):
    """Window: facts of the warm-up.

    Attributes:
        gradient_norm: warm-up gradient norm. 2-norm of all gradients at the last warm-up step, before clipping. It does not depend on the window's length.
    """

    gradient_norm: Number = None


class HostSpan(Struct):
    """Phases: time that the host spent.

    Attributes:
        mean_s: host mean (lower is better). Mean time that the host needed to issue <phase>.
        min_s: host min (lower is better). Shortest time that the host needed to issue <phase>.
        median_s: host median (lower is better). Median time that the host needed to issue <phase>.
        max_s: host max (lower is better). Longest time that the host needed to issue <phase>.
    """

    mean_s: Seconds = None
    min_s: Seconds = None
    median_s: Seconds = None
    max_s: Seconds = None


class Lag(Struct):
    """Phases: lag of the device behind the host.

    Attributes:
        min_s: lag min. Smallest lag of the device behind the host at the end of <phase>.
        median_s: lag median. Median lag of the device behind the host at the end of <phase>.
        max_s: lag max. Largest lag of the device behind the host at the end of <phase>.
    """

    min_s: Seconds = None
    median_s: Seconds = None
    max_s: Seconds = None


class PhaseSummary(Struct):
    """Phases: statistics of one phase, or of the step, over the window's full and unskipped steps.

    Attributes:
        n: n. Number of steps in the statistics of <phase>: steps of the window that are full and not skipped.
        mean_s: mean (lower is better). Mean time of <phase> on the device (on a CPU: the host's time).
        std_s: std (lower is better). Sample standard deviation of the time of <phase>, with n - 1 in the denominator.
        min_s: min (lower is better). Shortest time of <phase>.
        p5_s: p5 (lower is better). 5th percentile of the time of <phase>; null below 20 steps.
        p25_s: p25 (lower is better). 25th percentile of the time of <phase>, interpolated linearly.
        median_s: median (lower is better). Median time of <phase>.
        p75_s: p75 (lower is better). 75th percentile of the time of <phase>, interpolated linearly.
        p95_s: p95 (lower is better). 95th percentile of the time of <phase>; null below 20 steps.
        p99_s: p99 (lower is better). 99th percentile of the time of <phase>; null below 100 steps.
        max_s: max (lower is better). Longest time of <phase>.
        cv_fraction: CV (lower is better). Coefficient of variation: standard deviation divided by the mean.
        median_low_s: median low. Lower end of a confidence interval for the median within this run, from order statistics; null below 6 steps.
        median_high_s: median high. Upper end of the confidence interval for the median within this run.
        median_coverage_fraction: coverage. Exact confidence of the median's interval, at least 0.95, if steps are independent.
        lag1_autocorrelation: autocorrelation. Correlation of a step's time with that of the next step; null below 3 steps.
        outlier_count: outliers (lower is better). Steps that lie more than 3.5 robust standard deviations from the median, estimated from the median absolute deviation.
        trend_fraction: trend. Drift of the time from the window's start to its end, relative to the start: Theil-Sen line, its ends clamped to the values' range; null below 6 steps.
        trend_p: trend p. Probability of so strong an order of the values without any trend (Kendall's test); null below 6 steps.
        share_fraction: share. Mean time of <phase> divided by the mean step time.
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
        tokens_per_s: tokens/s (higher is better). Tokens per second: `window.tokens` / `window.wall_s`.
        model_flops_per_s: model FLOP/s (higher is better). Model FLOPs per second: tokens per second times `flops.per_token_flops`.
        mfu_fraction: MFU (higher is better). Model FLOPs utilization: model FLOP/s of one device divided by its peak, with attention counted in full.
        mfu_causal_fraction: causal MFU (higher is better). Model FLOPs utilization with causal attention counted half, since half of its products need not be computed.
        hfu_fraction: HFU (higher is better). Hardware FLOPs utilization: like MFU, but including the FLOPs that activation checkpointing computes again.
        mfu_reason: no MFU because. Why there is no MFU; null where there is one.
        joules_per_token: J/token (lower is better). Energy per token: `device_state.energy_j` / `window.tokens`.
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
        first: first loss (lower is better). Loss of step 0, which is a warm-up step unless `window.warmup_steps` is 0.
        last: last loss (lower is better). Loss of the window's last step.
        mean: mean loss (lower is better). Mean loss over the window.
        perplexity: perplexity (lower is better). Exponential of the mean loss: exp(`loss.mean`).
    """

    first: Nats = None
    last: Nats = None
    mean: Nats = None
    perplexity: Number = None


class RankRecord(Struct):
    """Figures of one rank for the window; `mean_s` holds its mean step time and mean phase times."""

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
    """Memory: contents of the device when an allocation failed.

    Attributes:
        phase: refused in. Phase in which the allocation failed.
        requested_bytes: refused (lower is better). Size of the allocation that failed, rounded up as the allocator rounds it.
        allocated_bytes: held (lower is better). Bytes allocated on the device when the allocation failed.
        reserved_bytes: reserved then (lower is better). Bytes reserved by PyTorch's allocator when the allocation failed.
        device_free_bytes: free then (higher is better). Bytes of the device that no process held when the allocation failed.
        parameters_bytes: parameters held (lower is better). Part of `allocated_bytes` that parameters and buffers held.
        gradients_bytes: gradients held (lower is better). Part of `allocated_bytes` that the gradients of parameters held.
        optimizer_state_bytes: optimizer state held (lower is better). Part of `allocated_bytes` that the optimizers' state held.
        rest_bytes: activations and the rest (lower is better). Remainder of `allocated_bytes`: activations, inputs, temporary tensors and workspaces.
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
        run_peak_allocated_bytes: run peak (lower is better). Largest number of bytes allocated on the device from the run's start to the window's end: it decides whether a run fits.
        run_peak_reserved_bytes: run peak reserved (lower is better). Largest number of bytes that PyTorch's allocator reserved from the run's start to the window's end.
        steady_peak_allocated_bytes: steady peak (lower is better). Largest number of bytes allocated on the device within the window.
        steady_peak_reserved_bytes: steady peak reserved (lower is better). Largest number of bytes that PyTorch's allocator reserved within the window.
        phase_peak_allocated_bytes: peak in <phase> (lower is better). Largest number of bytes allocated during <phase>, measured in probe steps.
        phase_begin_allocated_bytes: before <phase> (lower is better). Bytes allocated when <phase> begins, measured in probe steps. Before backward they include the saved activations.
        saved_bytes: saved (lower is better). Bytes that autograd saves in one forward of attention alone, without its inputs. Each storage counts once.
        expected_saved_bytes: saved by shape (lower is better). Bytes that eager attention should save in one forward, by its shape: softmax's result if written out, output and logsumexp if fused; null where unknown.
        device_total_bytes: device total. Total memory of the device.
        run_alloc_retry_count: retries (lower is better). Allocations of the run that succeeded only after the allocator had emptied its cache.
        window_alloc_retry_count: retries in window (lower is better). Allocations in the window that succeeded only after the allocator had emptied its cache.
        window_reserved_growth_bytes: growth (lower is better). Growth of the allocator's reserved memory from the window's start to its end.
        host_peak_rss_bytes: host peak (lower is better). Peak resident memory of the process on the host.
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
    """Device state: one reading from NVML, NVIDIA's management library.

    Attributes:
        read_at_s: read at. Time of the reading on the host's monotonic clock.
        sm_clock_hz: SM clock. Clock rate of the GPU's multiprocessors (SM) at the window's <end>.
        memory_clock_hz: memory clock. Clock rate of the GPU's memory at the window's <end>.
        temperature_c: temperature. Temperature of the GPU at the window's <end>.
        power_w: power. Power draw of the GPU at the window's <end>.
        energy_j: energy counter. Energy that the GPU has used since its driver was loaded.
        power_capped_s: power-capped. Total time so far during which the power cap held the clock down.
        thermal_capped_s: thermal-capped. Total time so far during which the temperature held the clock down.
        throttle_reasons: throttle reasons. Everything that holds the clock down at the time of the reading.
        memory_used_bytes: used. Memory of the device that all processes together use.
        other_process_pids: other pids. Ids of the other processes on the GPU; null where the driver hides them.
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
    """Device state: summary of the readings at the window's start and end.

    Attributes:
        mean_power_w: power (lower is better). Mean power between the two readings, from the GPU's energy counter.
        mean_temperature_c: mean temperature (lower is better). Mean of the temperatures at the window's two ends. A reading in between would cost time in the window.
        energy_j: energy (lower is better). Energy of the window: mean power times `window.wall_s`.
        power_capped_fraction: power-capped (lower is better). Share of the window during which the power cap held the clock down.
        thermal_capped_fraction: thermal-capped (lower is better). Share of the window during which the temperature held the clock down.
        sm_clock_drop_fraction: clock drop (lower is better). Loss of SM clock from the window's start to its end, as a share of the clock at the start.
        other_process_count: other processes (lower is better). Number of other processes on the GPU: the larger of both readings.
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
    """Host state: load of the machine during the window; null where the system does not report it.

    Attributes:
        load_per_core: load (lower is better). Load average of the last minute at the window's end, divided by the machine's cores.
        other_cpu_fraction: other processes (lower is better). Share of this process's cores that other processes kept busy in the window. Its child processes do not count as others.
        steal_fraction: steal (lower is better). Share of the cores' time in the window that the hypervisor gave to other virtual machines.
        waited_fraction: waited for a core (lower is better). Share of the window during which the training thread was ready to run but had to wait for a core.
    """

    load_per_core: Number = None
    other_cpu_fraction: Fraction = None
    steal_fraction: Fraction = None
    waited_fraction: Fraction = None


class LagVerdict(Struct):
    """Probe steps: whether a phase waits for the host.

    Attributes:
        verdict: <phase> verdict. `host-bound`, `queued` or `mixed`: whether the device ran out of work in <phase>, by the smallest lag within it.
        min_lag_s: <phase> min lag. Smallest lag within <phase>: the median of the probe steps.
        agree_fraction: <phase> agreement. Share of probe steps that agree on the verdict for <phase>.
        marks: <phase> marks. Number of times that the lag was measured within <phase> in one step.
    """

    verdict: Annotated[LagWord | None, "text"] = None
    min_lag_s: Seconds = None
    agree_fraction: Fraction = None
    marks: Count = None


class Communication(Struct):
    """Communication: how several ranks work together in a step; null on one rank.

    Attributes:
        sigterm_check_s: SIGTERM check (lower is better). Host time per step in Lightning's check for SIGTERM, a broadcast for each batch that the host waits for; 0 where the check is off.
        sigterm_check_location: place of the SIGTERM check. File and line of that check; null where it is off.
        bucket_copy_bytes: copied into buckets (lower is better). Bytes of gradients that DDP copies into its buckets in a step, because gradients are not views of them.
        bucket_split_count: splits at buckets (lower is better). Number of further graphs that came from Dynamo's splitting of graphs at DDP's buckets.
    """

    sigterm_check_s: Seconds = None
    sigterm_check_location: Text = None
    bucket_copy_bytes: Bytes = None
    bucket_split_count: Count = None


class HiddenSync(Struct):
    """A place in the code where the host waited for the device."""

    location: str
    count: int
    stack: str


class TrainingFacts(Struct):
    """Probe steps: whether parameters got gradients and moved.

    Attributes:
        parameters: checked. Number of trainable tensors that were checked; null if none were.
        missing_gradients: no gradient. Names of trainable tensors without a gradient.
        zero_gradients: zero gradient. Names of trainable tensors whose gradient is all zero.
        nonfinite_gradients: non-finite gradient. Names of trainable tensors whose gradient has a NaN or an infinity.
        unmoved_parameters: unmoved. Names of trainable tensors that the optimizer's step did not change; null without an optimizer.
        gradient_norm: gradient norm. 2-norm of all gradients, before clipping.
        is_skipped: check skipped. Whether the fp16 scaler skipped the update of the checked step.
    """

    parameters: Count = None
    missing_gradients: list[str] = []
    zero_gradients: list[str] = []
    nonfinite_gradients: list[str] = []
    unmoved_parameters: list[str] | None = None
    gradient_norm: Number = None
    is_skipped: Flag = None


class RunError(Struct):
    """Run: the exception that ended it.

    Attributes:
        kind: error. Type of the exception that ended the run.
        message: error message. Message of the exception that ended the run, in one line.
        phase: error phase. Phase in which the exception was raised: `setup` before the first step, `recording` or `summary` for lmbench's own work.
        requested_bytes: asked. Bytes of the allocation that failed, if the message of an out-of-memory error tells them.
        where: where. `device` or `host`: whose memory ran out.
        location: line of yours. Last line of the user's code that the exception passed through: `my_module.py:31 in training_step`.
        traceback_file: traceback. File in the result folder with all frames of the exception.
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
        """Whether the user's attention was found to be wrong: the speed of such a run means nothing."""
        return (self.message or "").startswith(f"{INCORRECT}: ")


class Probe(Struct):
    """Probe steps: unmeasured steps after the window.

    Attributes:
        requested_steps: probe steps asked for. Number of probe steps that were to measure the lag.
        is_complete: probed. Whether every kind of probe step was taken.
        error: probe error. Exception that ended the probe steps after a complete window, with the same parts as `error`.
        steps: probe steps. Probe steps that measured the lag; no statistic includes them.
        marked_modules: marked modules. Number of modules whose ends were marked in the probe steps.
        hidden_syncs: hidden syncs. Places where the host waited for the device in a probe step: location, stack, count; null if not looked for.
        synchronized_step_s: step, synchronized. Mean time of probe steps that synchronize gradients between ranks, on rank 0; null except with DDP.
        unsynchronized_step_s: step, not synchronized. Mean time of probe steps that do not synchronize gradients between ranks, on rank 0; null except with DDP.
    """

    requested_steps: Count = None
    is_complete: Flag = None
    error: RunError | None = None
    steps: Count = None
    marked_modules: Count = None
    hidden_syncs: list[HiddenSync] | None = None
    synchronized_step_s: Seconds = None
    unsynchronized_step_s: Seconds = None
    verdicts: PerPhase[LagVerdict] | None = None
    training: TrainingFacts | None = None


class TopKernel(Struct):
    """One of the longest kernels of its phase; times and counts are means per step."""

    name: str
    kind: str
    part: str
    kernel_s: float
    kernel_count: float
    share_fraction: float


class PhaseKernels(Struct):
    """Kernels: GPU kernels of one phase, or of the step including kernels outside all phases.

    Attributes:
        kernel_s: <phase> kernels (lower is better). Sum of the durations of all kernels of <phase>.
        kernel_count: kernels in <phase>. Number of kernels, copies and fills in <phase>.
        matmul_fraction: matmul in <phase>. Share of kernel time in matrix products (kind `gemm`); fused attention is not included.
        kinds: kinds. Kernel time by kind of kernel, the largest first: `gemm_s`, ...
        parts: parts. Kernel time by part of the model, the largest first: `ffn_s`, ...; `+` joins the parts of a fused kernel.
        top: top kernels. The longest kernels: name, kind, part, `kernel_s`, `kernel_count`, `share_fraction`.
        top_other: top other kernel. The longest kernel that is not a matrix product; null if there is none.
        window_s: <phase> window (lower is better). Time of the device in <phase>: `busy_s` + `queued_gap_s` + `host_wait_s` + `other_idle_s`.
        busy_s: <phase> busy (lower is better). Time during which at least one kernel, copy or fill ran. Where kernels of several phases overlap, the time counts for one.
        queued_gap_s: <phase> gaps (lower is better). Idle time in gaps of up to 30 us before kernels that were already queued.
        host_wait_s: <phase> host wait (lower is better). Idle time until the next kernel was launched: the device waited for the host.
        other_idle_s: <phase> other idle (lower is better). All other idle time: waiting for another stream, a copy or another rank, or for an unknown reason.
        comm_s: <phase> communication (lower is better). Time during which at least one communication kernel ran.
        comm_exposed_s: <phase> exposed communication (lower is better). Time during which a communication kernel ran and nothing computed beside it.
        host_s: <phase> on the host. Time that the host spent in <phase>, slowed by the profiler.
        launch_count: launches in <phase> (lower is better). Number of the host's calls that start work on the device.
        median_kernel_s: median kernel. Median duration of the kernels of <phase>.
        verdict: <phase> by the trace. Verdict of the trace on <phase>: `communication-bound`, `waits for other ranks`, `host-bound`, `stalled` (idle for another reason), `queued` or `mixed`; null for a phase too short to judge.
    """

    kernel_s: Seconds = None
    kernel_count: Annotated[float | None, "count"] = None
    matmul_fraction: Fraction = None
    kinds: dict[str, float] = {}
    parts: dict[str, float] = {}
    top: list[TopKernel] = []
    top_other: TopKernel | None = None
    window_s: Seconds = None
    busy_s: Seconds = None
    queued_gap_s: Seconds = None
    host_wait_s: Seconds = None
    other_idle_s: Seconds = None
    comm_s: Seconds = None
    comm_exposed_s: Seconds = None
    host_s: Seconds = None
    launch_count: Annotated[float | None, "count"] = None
    median_kernel_s: Seconds = None
    verdict: Text = None


class AttentionTimes(Struct):
    """Kernels: parts of attention that is written out.

    Attributes:
        scores_s: scores (lower is better). Kernel time of the product of queries and keys in <phase>, where attention is written out.
        mask_s: mask (lower is better). Kernel time of scaling and masking the scores.
        softmax_s: softmax (lower is better). Kernel time of the softmax.
        values_s: values (lower is better). Kernel time of the product with the values, including its copies.
        matmul_s: products (lower is better). Kernel time of the matrix products within scores and values.
        softmax_matmul_time_ratio: softmax / products. Time of the softmax divided by that of the matrix products.
        softmax_matmul_flop_ratio: softmax / products, FLOPs. FLOPs of the softmax divided by those of the matrix products; null where the model's shape is unknown.
    """

    scores_s: Seconds = None
    mask_s: Seconds = None
    softmax_s: Seconds = None
    values_s: Seconds = None
    matmul_s: Seconds = None
    softmax_matmul_time_ratio: Number = None
    softmax_matmul_flop_ratio: Number = None


class AnnotationKernels(Struct):
    """Kernels launched within one range of the user's (`record_function`); times and counts are means per step.

    `own_s` excludes the kernels of ranges inside it.
    """

    name: str
    calls: float
    kernel_s: float
    own_s: float
    kernel_count: float


class TopOperator(Struct):
    """One of the longest operators of its phase on the host; means per step, without the operators inside it."""

    phase: str
    name: str
    self_s: float
    call_count: float
    share_fraction: float


class KernelSummary(Struct):
    """Kernels: GPU kernels of the whole trace.

    Attributes:
        reason: no kernels because. Why no kernels are known, such as a run on a CPU or an unreadable trace; null where they are.
        steps: steps. Number of steps in the trace. Times and counts of phases are means over them.
        clock_steps: clocked steps. Number of steps behind busy and idle times. The first of several steps is left out, since it starts on an idle device.
        phase_source: phases by. Source of the ranges that mark the phases: `lmbench`, `foreign` or `none`.
        inferred_phases: inferred phases. Phases without a range: their start and end are inferred from the work of autograd.
        kernel_s: kernel time (lower is better). Kernel time of a step, including kernels outside all phases.
        outside_s: outside (lower is better). Kernel time that was launched outside every phase.
        unclassified_kind_fraction: no kind (lower is better). Share of kernel time whose kind is unknown.
        unclassified_part_fraction: no part (lower is better). Share of kernel time whose part of the model is unknown.
        captured_kernel_count: kernels in the trace. Number of kernels, copies and fills in the whole trace.
        captured_launch_count: launches in the trace. Number of launches in the whole trace.
        kernel_without_launch_count: without launch (lower is better). Number of kernels whose launch is missing from the trace.
        launch_without_kernel_count: without kernel (lower is better). Number of launches whose kernel is missing from the trace.
        kernel_before_launch_count: before launch (lower is better). Number of kernels that start before their launch.
        annotations: annotations. Kernels by the user's own ranges (`record_function`), the longest first: `name`, `calls`, `kernel_s`, `own_s` (without inner ranges), `kernel_count`.
        operators: operators. In a trace without kernels, each phase's longest operators on the host: `phase`, `name`, `self_s`, `call_count`, `share_fraction`.
    """

    reason: Text = None
    steps: Count = None
    clock_steps: Count = None
    phase_source: Text = None
    inferred_phases: list[str] = []
    kernel_s: Seconds = None
    outside_s: Seconds = None
    unclassified_kind_fraction: Fraction = None
    unclassified_part_fraction: Fraction = None
    captured_kernel_count: Count = None
    captured_launch_count: Count = None
    kernel_without_launch_count: Count = None
    launch_without_kernel_count: Count = None
    kernel_before_launch_count: Count = None
    phases: PerPhase[PhaseKernels] = part(PerPhase)
    annotations: list[AnnotationKernels] = []
    attention: PerPhase[AttentionTimes] = part(PerPhase)
    operators: list[TopOperator] = []


class SavedPerBlock(Struct):
    """Consecutive blocks of the model that save equally many bytes for the backward.

    `first` and `last` are paths of modules, `each_bytes` is the size for one block.
    """

    first: str
    last: str
    count: int
    each_bytes: int


class TopAllocation(Struct):
    """Allocations of one size and origin among the largest at the peak."""

    size_bytes: int
    count: int
    category: str
    part: str
    phase: str
    where: str


class MemoryHistoryRecord(Struct):
    """Memory history: contents of the peak of the recorded steps.

    Attributes:
        reason: no history because. Why there is no history, or why it could not be examined; null where it was.
        steps: recorded steps. Number of steps in the history, from the start of the window.
        max_entries: most entries. Largest number of entries that the history can hold; older entries are lost.
        snapshot_file: snapshot. Name of the snapshot in the result folder; `memory_notes.json` lies beside it.
        snapshot_bytes: snapshot size. Size of the snapshot's file.
        entry_count: entries. Number of entries in the history.
        is_complete: complete history. Whether the history has every entry of the recorded steps.
        peak_allocated_bytes: history's peak (lower is better). Largest number of bytes allocated in the recorded steps, by replaying the history.
        peak_requested_bytes: asked for at the peak (lower is better). Largest number of bytes in use in the recorded steps, before the allocator rounds sizes up.
        peak_reserved_bytes: reserved at the peak (lower is better). Bytes that the allocator had reserved at the peak.
        peak_phase: phase of the peak. Phase in which the peak was reached.
        unknown_fraction: unknown (lower is better). Share of the peak without a category.
        categories: peak by category. Bytes at the peak by category: `parameters_bytes`, ...
        parts: peak by part. Bytes at the peak by the module that allocated them, the largest first; `*` stands for any block.
        saved_bytes: saved for backward (lower is better). Bytes that the forward saved for the backward in the step of the peak, without parameters.
        saved: saved by block. Tensors that the forward saved for the backward, by block of the model: first, last, count, `each_bytes`.
        residual_computed_bytes: residual stream. Size of the residual stream by the model's shape: batch x context x d_model, in the precision between the blocks.
        residual_seen_bytes: residual stream seen. Size of the residual stream in the history: that of most blocks' outputs.
        top: largest. The largest allocations at the peak: size, count, category, part, phase and where they were made.
    """

    reason: Text = None
    steps: Count = None
    max_entries: Count = None
    snapshot_file: Text = None
    snapshot_bytes: Bytes = None
    entry_count: Count = None
    is_complete: Flag = None
    peak_allocated_bytes: Bytes = None
    peak_requested_bytes: Bytes = None
    peak_reserved_bytes: Bytes = None
    peak_phase: Text = None
    unknown_fraction: Fraction = None
    categories: dict[str, int] = {}
    parts: dict[str, int] = {}
    saved_bytes: Bytes = None
    saved: list[SavedPerBlock] = []
    residual_computed_bytes: Bytes = None
    residual_seen_bytes: Bytes = None
    top: list[TopAllocation] = []


class MemoryPrediction(Struct):
    """Memory prediction: peak memory predicted from the configuration, on fake tensors without data.

    Attributes:
        reason: no prediction because. Why there is no prediction although one was asked for; null otherwise.
        method: predicted from. What was run on fake tensors: every block of the model, or only a few.
        peak_allocated_bytes: predicted peak (lower is better). Predicted peak of allocated memory in a step.
        peak_reserved_bytes: predicted reserved (lower is better). Predicted memory that the allocator reserves.
        phase_peak_allocated_bytes: predicted peak in <phase> (lower is better). Predicted peak of allocated memory in <phase>.
        error_fraction: prediction error. Relative error of the prediction, with its sign: predicted / `memory.steady_peak_allocated_bytes` - 1; null where nothing was measured.
    """

    reason: Text = None
    method: Text = None
    peak_allocated_bytes: Bytes = None
    peak_reserved_bytes: Bytes = None
    phase_peak_allocated_bytes: PhaseBytes = None
    error_fraction: Fraction = None


class NotedTensors(Struct):
    """The dtypes of one kind of tensors (`gradients`): number of tensors by dtype, and the reason for the dtype."""

    name: str
    dtypes: dict[str, int]
    reason: str


class DtypeRecord(Struct):
    """Dtypes: dtypes in one probe step.

    Attributes:
        reason: no dtypes because. Why no dtypes were recorded; null where they were.
        notes_file: dtypes. Name of the file in the result folder with the dtypes of modules and operators.
        autocast_dtype: autocast. Lower precision of autocast; null where autocast was off.
        was_compiled: noted eagerly. Whether the run is compiled. The recorded step was not, since no hook sees into a compiled graph.
        loss_scale: loss scale. Factor by which the loss, and so the gradients until the optimizer's step, were multiplied; null without a scaler.
        tensors: dtypes of tensors. Dtypes of parameters, buffers, batch, logits, loss, gradients and optimizer state: name, count by dtype, reason.
        unused_modules: unused modules. Paths of modules that the step never called, except those whose parameters another module uses.
    """

    reason: Text = None
    notes_file: Text = None
    autocast_dtype: Text = None
    was_compiled: Flag = None
    loss_scale: Number = None
    tensors: list[NotedTensors] = []
    unused_modules: list[str] = []
