# ruff: noqa: E501 (tables, one field a line)
# fmt: off
"""What a run measured: window, phases, rates, memory, device state, probe steps."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct, field

from lmbench.records.field import Bytes, Count, Flag, Fraction, Number, PerPhase, Seconds, Text
from lmbench.records.vocabulary import INCORRECT

LagWord = Literal["host-bound", "queued", "mixed"]


class Window(Struct):
    """Window: the steps between two synchronizes."""

    warmup_steps: Annotated[Count, "warm-up", "Steps before the window."] = None
    requested_steps: Annotated[Count, "steps asked for", "Steps the window was to have at least; null until training ends."] = None
    requested_s: Annotated[Seconds, "time asked for", "Seconds the window was to last at least."] = None
    steps: Annotated[Count, "steps", "Steps in the window, skipped and short ones included."] = None
    first_step: Annotated[int | None, "index", "first step", "Index of the window's first step."] = None
    micro_batches: Annotated[Count, "micro-batches", "Micro-batches of a full step."] = None
    skipped_count: Annotated[Count, "skipped", "Steps the fp16 scaler skipped; in no statistic.", "down"] = None
    short_count: Annotated[Count, "short", "Steps with fewer micro-batches than a full one; in no statistic."] = None
    tokens: Annotated[Count, "tokens", "Tokens of all steps, micro-batches and ranks."] = None
    tokens_reason: Annotated[Text, "no tokens because", "Why `tokens` is not known, where it is not."] = None
    wall_s: Annotated[Seconds, "wall", "Wall time between the two synchronizes, `excluded_s` subtracted; clocked apart from the steps."] = None
    steps_sum_s: Annotated[Seconds, "sum of steps", "Sum of `step_s` over the window."] = None
    excluded_s: Annotated[Seconds, "excluded", "Validation, checkpoints and record writing within the window, already subtracted."] = None
    excluded_count: Annotated[Count, "exclusions", "How often that happened."] = None
    clock_drift_fraction: Annotated[Fraction, "clock drift", "How much faster the device's clock ran than the host's; corrected in the lags."] = None
    identity_error_fraction: Annotated[Fraction, "identity error", "Signed: (`steps_sum_s` - `wall_s`) / `wall_s`."] = None


class Warmup(Struct):
    """Window: what the warm-up showed."""

    gradient_norm: Annotated[Number, "warm-up gradient norm", "2-norm of all gradients at the last warm-up step, before clipping: the same step whatever the window."] = None


class HostSpan(Struct):
    """Phases: host spans."""

    mean_s: Annotated[Seconds, "host mean", "Mean host span of <phase>.", "down"] = None
    min_s: Annotated[Seconds, "host min", "Smallest host span.", "down"] = None
    median_s: Annotated[Seconds, "host median", "Median host span.", "down"] = None
    max_s: Annotated[Seconds, "host max", "Largest host span.", "down"] = None


class Lag(Struct):
    """Phases: lags."""

    min_s: Annotated[Seconds, "lag min", "Smallest lag at the end of <phase>."] = None
    median_s: Annotated[Seconds, "lag median", "Median lag at the end of <phase>."] = None
    max_s: Annotated[Seconds, "lag max", "Largest lag at the end of <phase>."] = None


class PhaseSummary(Struct):
    """Phases: statistics of one phase, or of the step, over the window's full and unskipped steps."""

    n: Annotated[Count, "n", "Steps behind the statistics of <phase>: in the window, full, not skipped."] = None
    mean_s: Annotated[Seconds, "mean", "Mean device span of <phase>.", "down"] = None
    std_s: Annotated[Seconds, "std", "Sample standard deviation (n - 1).", "down"] = None
    min_s: Annotated[Seconds, "min", "Smallest value.", "down"] = None
    p5_s: Annotated[Seconds, "p5", "5th percentile, from 20 steps on.", "down"] = None
    p25_s: Annotated[Seconds, "p25", "25th percentile, linear between order statistics.", "down"] = None
    median_s: Annotated[Seconds, "median", "Median.", "down"] = None
    p75_s: Annotated[Seconds, "p75", "75th percentile.", "down"] = None
    p95_s: Annotated[Seconds, "p95", "95th percentile, from 20 steps on.", "down"] = None
    p99_s: Annotated[Seconds, "p99", "99th percentile, from 100 steps on.", "down"] = None
    max_s: Annotated[Seconds, "max", "Largest value.", "down"] = None
    cv_fraction: Annotated[Fraction, "CV", "Standard deviation divided by the mean.", "down"] = None
    median_low_s: Annotated[Seconds, "median low", "Lower end of the median's interval within this run (order statistics, 6 steps on)."] = None
    median_high_s: Annotated[Seconds, "median high", "Upper end of that interval."] = None
    median_coverage_fraction: Annotated[Fraction, "coverage", "That interval's real coverage, at least 0.95, if steps are independent."] = None
    lag1_autocorrelation: Annotated[Number, "autocorrelation", "Correlation of a step with the next one."] = None
    outlier_count: Annotated[Count, "outliers", "Values over 3.5 robust deviations (from the MAD) off the median.", "down"] = None
    trend_fraction: Annotated[Fraction, "trend", "Drift over the window by Theil and Sen's line, within what the steps span, as a fraction of the median."] = None
    trend_p: Annotated[Number, "trend p", "How likely such an order of values is without a trend (Kendall)."] = None
    share_fraction: Annotated[Fraction, "share", "Mean of <phase> divided by the mean step."] = None
    host: HostSpan = field(default_factory=HostSpan)
    lag: Lag | None = None


class Throughput(Struct):
    """Throughput: rates of the window."""

    tokens_per_s: Annotated[float | None, "tokens/s", "tokens/s", "`window.tokens` / `window.wall_s`.", "up"] = None
    model_flops_per_s: Annotated[float | None, "FLOP/s", "model FLOP/s", "Tokens/s times model FLOPs per token.", "up"] = None
    mfu_fraction: Annotated[Fraction, "MFU", "Model FLOP/s of one device over its peak, attention counted full.", "up"] = None
    mfu_causal_fraction: Annotated[Fraction, "causal MFU", "The same with attention halved.", "up"] = None
    hfu_fraction: Annotated[Fraction, "HFU", "Hardware FLOP/s over the peak: model FLOPs and those that activation checkpointing computes again.", "up"] = None
    mfu_reason: Annotated[Text, "no MFU because", "Why there is no MFU, null where there is one."] = None
    joules_per_token: Annotated[float | None, "J/token", "J/token", "`device_state.energy_j` / `window.tokens`.", "down"] = None


class Loss(Struct):
    """Throughput: losses."""

    first: Annotated[float | None, "nat", "first loss", "Loss of step 0, warm-up included.", "down"] = None
    last: Annotated[float | None, "nat", "last loss", "Loss of the window's last step.", "down"] = None
    mean: Annotated[float | None, "nat", "mean loss", "Mean loss over the window.", "down"] = None
    perplexity: Annotated[Number, "perplexity", "exp(`loss.mean`).", "down"] = None


class RefusedAllocation(Struct):
    """Memory: what the device held when it had no room for one more tensor."""

    phase: Annotated[Text, "refused in", "Phase in which the allocator was refused."] = None
    requested_bytes: Annotated[Bytes, "refused", "Bytes asked for, as the allocator rounds them.", "down"] = None
    allocated_bytes: Annotated[Bytes, "held", "Allocated at that moment.", "down"] = None
    reserved_bytes: Annotated[Bytes, "reserved then", "Reserved by the allocator at that moment.", "down"] = None
    device_free_bytes: Annotated[Bytes, "free then", "Free on the device at that moment, held by nobody.", "up"] = None
    parameters_bytes: Annotated[Bytes, "parameters held", "Of `allocated_bytes`: parameters and buffers.", "down"] = None
    gradients_bytes: Annotated[Bytes, "gradients held", "Of `allocated_bytes`: gradients of parameters.", "down"] = None
    optimizer_state_bytes: Annotated[Bytes, "optimizer state held", "Of `allocated_bytes`: state of the optimizers.", "down"] = None
    rest_bytes: Annotated[Bytes, "activations and the rest", "What remains of `allocated_bytes`: activations, inputs, temporaries, workspaces.", "down"] = None


class Memory(Struct):
    """Memory: peaks of the allocator and of the process."""

    run_peak_allocated_bytes: Annotated[Bytes, "run peak", "Peak allocated on the device over the whole run (decides what fits).", "down"] = None
    run_peak_reserved_bytes: Annotated[Bytes, "run peak reserved", "Peak reserved by the allocator over the whole run.", "down"] = None
    steady_peak_allocated_bytes: Annotated[Bytes, "steady peak", "Peak allocated within the window.", "down"] = None
    steady_peak_reserved_bytes: Annotated[Bytes, "steady peak reserved", "Peak reserved within the window.", "down"] = None
    phase_peak_allocated_bytes: Annotated[PerPhase[int] | None, "bytes", "peak in <phase>", "Peak allocated in <phase>, from the probe steps.", "down"] = None
    phase_begin_allocated_bytes: Annotated[PerPhase[int] | None, "bytes", "before <phase>", "Allocated when <phase> begins, from the probe steps: before backward, what forward keeps for it is in it.", "down"] = None
    saved_bytes: Annotated[Bytes, "saved", "What autograd saves in one forward of attention by itself, besides its inputs: tensors counted where it saves them, each storage once.", "down"] = None
    expected_saved_bytes: Annotated[Bytes, "saved by shape", "The same by shape, of eager attention: softmax's result if written out, output and logsumexp if fused; null where nobody knows.", "down"] = None
    device_total_bytes: Annotated[Bytes, "device total", "Memory of the device."] = None
    run_alloc_retry_count: Annotated[Count, "retries", "Allocations that worked only after the cache was emptied.", "down"] = None
    window_alloc_retry_count: Annotated[Count, "retries in window", "The same within the window.", "down"] = None
    window_reserved_growth_bytes: Annotated[Bytes, "growth", "What the allocator reserved more at the window's end than at its start.", "down"] = None
    refused: RefusedAllocation | None = None
    host_peak_rss_bytes: Annotated[Bytes, "host peak", "Peak resident memory of the process.", "down"] = None


class DeviceReading(Struct):
    """Device state: one reading by NVML."""

    read_at_s: Annotated[Seconds, "read at", "Monotonic clock at the reading."] = None
    sm_clock_hz: Annotated[float | None, "Hz", "SM clock", "SM clock at the window's <end>."] = None
    memory_clock_hz: Annotated[float | None, "Hz", "memory clock", "Memory clock."] = None
    temperature_c: Annotated[float | None, "°C", "temperature", "Temperature of the GPU."] = None
    power_w: Annotated[float | None, "W", "power", "Power draw."] = None
    energy_j: Annotated[float | None, "J", "energy counter", "Energy since the driver was loaded."] = None
    power_capped_s: Annotated[Seconds, "power-capped", "Counter of the time that the power cap held the clock down."] = None
    thermal_capped_s: Annotated[Seconds, "thermal-capped", "The same for temperature."] = None
    throttle_reasons: Annotated[list[str] | None, "tree", "throttle reasons", "What holds the clock at this moment."] = None
    memory_used_bytes: Annotated[Bytes, "used", "Memory used on the device by all processes."] = None
    other_process_pids: Annotated[list[int] | None, "tree", "other pids", "Other processes on the GPU, where the driver shows them."] = None
    other_process_count: Annotated[Count, "other processes", "How many; null where the driver hides processes."] = None


class DeviceState(Struct):
    """Device state: what two readings say of the window between them."""

    open: Annotated[DeviceReading, "<end>"] = field(default_factory=DeviceReading)
    close: Annotated[DeviceReading, "<end>"] = field(default_factory=DeviceReading)
    mean_power_w: Annotated[float | None, "W", "power", "Mean power between the two readings, from the energy counter.", "down"] = None
    mean_temperature_c: Annotated[float | None, "°C", "mean temperature", "Mean of the temperatures at the window's two ends: reading it in between would cost time in the window.", "down"] = None
    energy_j: Annotated[float | None, "J", "energy", "Mean power times `window.wall_s`.", "down"] = None
    power_capped_fraction: Annotated[Fraction, "power-capped", "Share of the time that the power cap held the clock down.", "down"] = None
    thermal_capped_fraction: Annotated[Fraction, "thermal-capped", "The same for temperature.", "down"] = None
    sm_clock_drop_fraction: Annotated[Fraction, "clock drop", "SM clock lost from the window's start to its end.", "down"] = None
    other_process_count: Annotated[Count, "other processes", "The larger of both readings.", "down"] = None


class HostState(Struct):
    """Host state: what else the machine did in the window; null where the system does not tell."""

    load_per_core: Annotated[Number, "load", "The machine's load of the last minute at the window's end, divided by its cores.", "down"] = None
    other_cpu_fraction: Annotated[Fraction, "other processes", "Share of the time of the cores this process may use that others (its children left out) took in the window.", "down"] = None
    steal_fraction: Annotated[Fraction, "steal", "Share that the hypervisor gave to other machines.", "down"] = None
    waited_fraction: Annotated[Fraction, "waited for a core", "Share of the window in which the training thread could have run and had no core.", "down"] = None


class LagVerdict(Struct):
    """Probe steps: whether a phase waits for the host."""

    verdict: Annotated[LagWord | None, "text", "<phase> verdict", "`host-bound`, `queued` or `mixed`, by the smallest lag within <phase>."] = None
    min_lag_s: Annotated[Seconds, "<phase> min lag", "Median over probe steps of the smallest lag within <phase>."] = None
    agree_fraction: Annotated[Fraction, "<phase> agreement", "Share of probe steps that gave this verdict."] = None
    marks: Annotated[Count, "<phase> marks", "Marks within <phase> in one step."] = None


class HiddenSync(Struct):
    """One place that made the host wait for the device."""

    location: str
    count: int
    stack: str


class TrainingFacts(Struct):
    """Probe steps: did it train?"""

    parameters: Annotated[Count, "checked", "Trainable tensors that were checked; null if none were."] = None
    missing_gradients: Annotated[list[str], "tree", "no gradient", "Names of those without a gradient."] = []
    zero_gradients: Annotated[list[str], "tree", "zero gradient", "Names of those whose gradient is all zero."] = []
    nonfinite_gradients: Annotated[list[str], "tree", "non-finite gradient", "Names of those whose gradient is not finite."] = []
    unmoved_parameters: Annotated[list[str] | None, "tree", "unmoved", "Names of those that the optimizer left as they were; null without one."] = None
    gradient_norm: Annotated[Number, "gradient norm", "2-norm of all gradients, before clipping."] = None
    is_skipped: Annotated[Flag, "check skipped", "The fp16 scaler skipped the checked step."] = None


class RunError(Struct):
    """Run: what ended it."""

    kind: Annotated[Text, "error", "Type of the exception that ended the run."] = None
    message: Annotated[Text, "error message", "Its message, in one line."] = None
    phase: Annotated[Text, "error phase", "Phase it happened in; `setup` before the first step, `recording` or `summary` for lmbench's own work."] = None
    requested_bytes: Annotated[Bytes, "asked", "Bytes asked for when memory ran out, where the message says."] = None
    where: Annotated[Text, "where", "`device` or `host`: whose memory ran out."] = None
    location: Annotated[Text, "line of yours", "The last line of your own code that the exception came through: `my_module.py:31 in training_step`."] = None
    traceback_file: Annotated[Text, "traceback", "All frames of the exception, in the result folder."] = None

    @property
    def is_incorrect(self) -> bool:
        """Attention was found wrong, and so the run has no speed."""
        return (self.message or "").startswith(f"{INCORRECT}: ")


class Probe(Struct):
    """Probe steps: unmeasured steps after the window."""

    requested_steps: Annotated[Count, "probe steps asked for", "Steps that were to look at the lag."] = None
    is_complete: Annotated[Flag, "probed", "Every kind of probe step was taken."] = None
    error: Annotated[RunError | None, "tree", "probe error", "What ended the probe steps too soon, after a complete window: like `error`."] = None
    steps: Annotated[Count, "probe steps", "Steps after the window that were probed; in no statistic."] = None
    marked_modules: Annotated[Count, "marked modules", "Modules whose ends were marked in the probe steps."] = None
    hidden_syncs: Annotated[list[HiddenSync] | None, "tree", "hidden syncs", "Synchronizes found in a probe step: location, stack, count; null if not looked for."] = None
    verdicts: PerPhase[LagVerdict] | None = None
    training: TrainingFacts | None = None
