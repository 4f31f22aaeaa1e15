# ruff: noqa: E501 (tables, one field a line)
"""What a run measured (window, phases, rates, memory, device state, probe steps), its guards, and what passes besides
timing found: kernels in a trace, the allocator's history, a predicted peak, dtypes.
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

#: The guard whose warning makes a comparison of sides that were not measured in turn undecided.
BUSY_MACHINE = "busy_machine"


class Guard(Struct, frozen=True):
    """One check.

    `value` and `limit` are in `unit`, None where the check has no figure; `advice` is empty unless it is
    needed.
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

    @property
    def step_tokens(self) -> float | None:
        """Tokens of a step, of all ranks; None where nobody counts them."""
        return self.tokens / self.steps if self.tokens and self.steps else None


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
        synchronized_step_s: step, synchronized. Rank 0's mean of probe steps that synchronize gradients; null but for DDP.
        unsynchronized_step_s: step, not synchronized. Rank 0's mean of probe steps that do not synchronize gradients; null but for DDP.
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
    """A kernel among the longest of its phase; times and counts are means per step."""

    name: str
    kind: str
    part: str
    kernel_s: float
    kernel_count: float
    share_fraction: float


class PhaseKernels(Struct):
    """Kernels: kernels of one phase, or of the step with what lies outside of all phases.

    Attributes:
        kernel_s: <phase> kernels (lower is better). Sum of the kernels of <phase>.
        kernel_count: kernels in <phase>. Kernels, copies and fills.
        matmul_fraction: matmul in <phase>. Share of matrix products (kind `gemm`) in kernel time; fused attention is not counted.
        kinds: kinds. Kernel time by kind, the largest first: `gemm_s`, ...
        parts: parts. Kernel time by part of the model, the largest first: `ffn_s`, ...; `+` joins the parts of a fused kernel.
        top: top kernels. The longest kernels: name, kind, part, `kernel_s`, `kernel_count`, `share_fraction`.
        top_other: top other kernel. The longest kernel that is no matrix product; null if there is none.
        window_s: <phase> window (lower is better). The device's time with <phase>: `busy_s` + `queued_gap_s` + `host_wait_s` + `other_idle_s`.
        busy_s: <phase> busy (lower is better). Union of kernels, copies and fills; a moment with kernels of several phases is of one of them.
        queued_gap_s: <phase> gaps (lower is better). Gaps of up to 30 us before kernels that lay in the queue.
        host_wait_s: <phase> host wait (lower is better). Idle until the next kernel was launched: the device waited for the host.
        other_idle_s: <phase> other idle (lower is better). All other idle time: waiting for another stream, a copy or another rank, or unknown.
        comm_s: <phase> communication (lower is better). Union of communication kernels.
        comm_exposed_s: <phase> exposed communication (lower is better). Communication beside which nothing computes.
        host_s: <phase> on the host. The host's time in <phase>, slowed by the profiler.
        launch_count: launches in <phase> (lower is better). Calls of the host that start something on the device.
        median_kernel_s: median kernel. Median duration of the kernels of <phase>.
        verdict: <phase> by the trace. `communication-bound`, `host-bound`, `stalled` (idle for something else), `queued` or `mixed`, by the shares of its time; null for a phase too short to judge.
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
        scores_s: scores (lower is better). Kernel time of the score product in <phase>, where attention is written out.
        mask_s: mask (lower is better). Scaling the scores and masking them.
        softmax_s: softmax (lower is better). Softmax.
        values_s: values (lower is better). The value product and its copies.
        matmul_s: products (lower is better). Matrix products within scores and values.
        softmax_matmul_time_ratio: softmax / products. Time of softmax divided by that of the products.
        softmax_matmul_flop_ratio: softmax / products, FLOPs. FLOPs of softmax divided by those of the products; null without the model's shape.
    """

    scores_s: Seconds = None
    mask_s: Seconds = None
    softmax_s: Seconds = None
    values_s: Seconds = None
    matmul_s: Seconds = None
    softmax_matmul_time_ratio: Number = None
    softmax_matmul_flop_ratio: Number = None


class AnnotationKernels(Struct):
    """The kernels that were launched within one of the user's own ranges; means per step."""

    name: str
    calls: float
    kernel_s: float
    own_s: float
    kernel_count: float


class TopOperator(Struct):
    """An operator among the longest of its phase on the host, without those inside it; means per step."""

    phase: str
    name: str
    self_s: float
    call_count: float
    share_fraction: float


class KernelSummary(Struct):
    """Kernels: kernels of the whole trace.

    Attributes:
        reason: no kernels because. Why nothing is known of the kernels (a CPU, a trace that cannot be read); null where it is.
        steps: steps. Steps in the trace; times and counts of phases are means over them.
        clock_steps: clocked steps. Steps that the clocks are over: the first of several begins on an idle device and is left out.
        phase_source: phases by. Whose ranges tell the phases: `lmbench`, `foreign` or `none`.
        inferred_phases: inferred phases. Phases that no range tells, only what autograd runs: where they begin and end is inferred.
        kernel_s: kernel time (lower is better). Kernel time of a step, what lies outside of all phases included.
        outside_s: outside (lower is better). Kernel time launched outside of every phase.
        unclassified_kind_fraction: no kind (lower is better). Share of kernel time whose kind is unknown.
        unclassified_part_fraction: no part (lower is better). Share of kernel time whose part of the model is unknown.
        captured_kernel_count: kernels in the trace. Kernels, copies and fills of the whole trace.
        captured_launch_count: launches in the trace. Launches of the whole trace.
        kernel_without_launch_count: without launch (lower is better). Kernels whose launch is not in the trace.
        launch_without_kernel_count: without kernel (lower is better). Launches whose kernel is not in the trace.
        kernel_before_launch_count: before launch (lower is better). Kernels that start before their launch.
        annotations: annotations. Kernels by the user's own ranges (`record_function`), the longest first: `name`, `calls`, `kernel_s`, `own_s` (without ranges inside), `kernel_count`.
        operators: operators. Of a trace without kernels, each phase's longest operators on the host: `phase`, `name`, `self_s`, `call_count`, `share_fraction`.
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
    """Blocks of the model that save alike for the backward, the first and the last by path; bytes of each."""

    first: str
    last: str
    count: int
    each_bytes: int


class TopAllocation(Struct):
    """Blocks of one kind among the largest at the peak."""

    size_bytes: int
    count: int
    category: str
    part: str
    phase: str
    where: str


class MemoryHistoryRecord(Struct):
    """Memory history: what the peak of the recorded steps is made of.

    Attributes:
        reason: no history because. Why there is no history, or why it could not be examined; null where it is.
        steps: recorded steps. Steps in the history: the first of the window.
        max_entries: most entries. Entries that the history may hold; older ones are lost.
        snapshot_file: snapshot. The snapshot, in the result folder; `memory_notes.json` lies beside it.
        snapshot_bytes: snapshot size. Size of the snapshot.
        entry_count: entries. Entries of the history.
        is_complete: complete history. No entry of the recorded steps is missing.
        peak_allocated_bytes: history's peak (lower is better). Most that was allocated in the recorded steps, as replayed.
        peak_requested_bytes: asked for at the peak (lower is better). Most that was allocated in the recorded steps, as asked for before rounding.
        peak_reserved_bytes: reserved at the peak (lower is better). Reserved by the allocator at the peak.
        peak_phase: phase of the peak. Phase in which the peak is.
        unknown_fraction: unknown (lower is better). Share of the peak without a category.
        categories: peak by category. Bytes at the peak by category: `parameters_bytes`, ...
        parts: peak by part. Bytes at the peak by the module that made them, the largest first; `*` is any block.
        saved_bytes: saved for backward (lower is better). What the forward of the peak's step saved for the backward, parameters left out.
        saved: saved by block. What the forward saved for the backward, by block of the model: first, last, count, `each_bytes`.
        residual_computed_bytes: residual stream. Batch x context x d_model by the shape, in the precision between the blocks.
        residual_seen_bytes: residual stream seen. Size of most blocks' outputs in the history.
        top: largest. The largest allocations at the peak: size, count, category, part, phase, where from.
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
    """Memory prediction: a peak worked out by the configuration alone, on fake tensors.

    Attributes:
        reason: no prediction because. Why there is no prediction, where it was asked for and there is none.
        method: predicted from. What was run on fake tensors: every block, or a few of them.
        peak_allocated_bytes: predicted peak (lower is better). Peak that was predicted for a step.
        peak_reserved_bytes: predicted reserved (lower is better). What the allocator was predicted to hold for it.
        phase_peak_allocated_bytes: predicted peak in <phase> (lower is better). Peak that was predicted for <phase>.
        error_fraction: prediction error. Signed: predicted / `memory.steady_peak_allocated_bytes` - 1; null where nothing was measured.
    """

    reason: Text = None
    method: Text = None
    peak_allocated_bytes: Bytes = None
    peak_reserved_bytes: Bytes = None
    phase_peak_allocated_bytes: PhaseBytes = None
    error_fraction: Fraction = None


class NotedTensors(Struct):
    """Tensors of one kind: how many there are of each dtype (`float32`), and why they have it."""

    name: str
    dtypes: dict[str, int]
    reason: str


class DtypeRecord(Struct):
    """Dtypes: dtypes that a probe step had.

    Attributes:
        reason: no dtypes because. Why no dtypes were noted; null where they were.
        notes_file: dtypes. Modules and operators with their dtypes, in the result folder.
        autocast_dtype: autocast. Autocast's lower precision, null where it was off.
        was_compiled: noted eagerly. The run is compiled, and the step whose dtypes were noted was not: no hook sees into a compiled graph.
        loss_scale: loss scale. What the loss, and so the gradients until the optimizer's step, were multiplied by; null without a scaler.
        tensors: dtypes of tensors. Parameters, buffers, batch, logits, loss, gradients, optimizer state: name, count by dtype, reason.
        unused_modules: unused modules. Paths of modules that the step never called, but for those whose parameters another module uses.
    """

    reason: Text = None
    notes_file: Text = None
    autocast_dtype: Text = None
    was_compiled: Flag = None
    loss_scale: Number = None
    tensors: list[NotedTensors] = []
    unused_modules: list[str] = []
