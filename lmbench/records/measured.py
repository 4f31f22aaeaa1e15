"""The measured parts of a run's record: window, phases, rates, memory, device state, probe steps and guards."""

from __future__ import annotations

from textwrap import shorten
from typing import Annotated, Literal

from msgspec import Meta, Struct

from lmbench.records.endurance import Growth, StepChange
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
    Offset,
    PerPhase,
    PhaseBytes,
    Seconds,
    Text,
    TokensPerSecond,
    Watts,
    about,
    higher,
    lower,
    part,
    record,
)
from lmbench.records.vocabulary import INCORRECT, Span

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


@record
class Window:
    """Window: the measured steps, between two synchronizations of host and device."""

    warmup_steps: Count = about("Steps before the window, which no statistic includes.")
    loader_end_count: Count = about(
        "Steps of the window before which the training loader ended; its restart is in `data`."
    )
    loader_batches: Count = about("Batches after which the loader ends; null if it did not.")
    loader_restart_s: Seconds = lower(
        "What a restart of the loader adds to a step: mean `data_s` of steps that follow the loader's end, less the "
        "median of the others."
    )
    pace_steps: Count = about(
        "Further steps of the warm-up, until the pace of several ranks was steady; null on one rank."
    )
    requested_steps: Count = about(
        "Least number of steps that the window was to have; null where it was to last until training ends."
    )
    requested_s: Seconds = about("Least time that the window was to last.")
    steps: Count = about("Steps in the window, including those that were skipped and those with too few micro-batches.")
    first_step: Index = about("Index of the window's first step.")
    micro_batches: Count = about("Micro-batches of a full step.", "micro-batches")
    skipped_count: Count = lower(
        "Steps of the window whose update was skipped (by the fp16 scaler, or without a loss); no statistic includes "
        "them.",
        "skipped steps",
        over="sum",
    )
    short_count: Count = about(
        "Steps of the window with fewer micro-batches than a full step; no statistic includes them."
    )
    tokens: Count = about("Tokens of all the window's steps, micro-batches and ranks.")
    tokens_reason: Text = about("Why `tokens` is null; null where it is known.")
    wall_s: Seconds = about(
        "Wall time between the two synchronizations, less `excluded_s`. Its clock is not the one that times the steps."
    )
    steps_sum_s: Seconds = about("Sum of `step_s` over all steps of the window.")
    excluded_s: Seconds = about(
        "Time within the window for validation, checkpoints and writing records; already subtracted from `wall_s` and "
        "`step_s`."
    )
    checkpoint_s: Seconds = lower("Part of `excluded_s` in which checkpoints were saved.")
    validation_s: Seconds = lower("Part of `excluded_s` in which validations ran.")
    goodput_fraction: Fraction = higher(
        "Share of the window's wall time that its steps take: `wall_s` / (`wall_s` + `excluded_s`)."
    )
    changes: list[StepChange] = about(
        "Changes of the step time within the window, by 2 % at least: step, seconds from the window's start, ratio "
        "with 95 % interval (medians of blocks of steps count as independent), and means of clock, temperature, memory "
        "and garbage collection before and after.",
        factory=list,
    )
    turn_steps_s: Annotated[list[Annotated[float, Meta(gt=0, le=1e12)]] | None, "s"] = about(
        "Typical `step_s` of each turn, the trimean of its steps; null where no other process measured in between."
    )
    changed_flags: list[str] | None = about("Switches of PyTorch that changed within the window, with both values.")
    replaced_functions: list[str] | None = about(
        "Clocks and synchronizes of Python, PyTorch and lmbench that were not the original functions when the window "
        "opened or closed."
    )
    identity_error_fraction: Fraction = about(
        "Difference between the sum of the steps and the window, with its sign: (`steps_sum_s` - `wall_s`) / `wall_s`."
    )

    @property
    def lasted_s(self) -> float:
        """Wall time of the window with its pauses; 0 where no window was completed."""
        return (self.wall_s or 0.0) + (self.excluded_s or 0.0)

    @property
    def step_tokens(self) -> float | None:
        """Mean tokens of a step over all ranks; None where tokens are not counted."""
        return self.tokens / self.steps if self.tokens and self.steps else None


@record
class Warmup:
    """Window: facts of the warm-up."""

    gradient_norm: Number = about(
        "2-norm of all gradients at the last warm-up step, before clipping. It does not depend on the window's length."
    )


@record
class HostSpan:
    """Phases: time that the host spent."""

    mean_s: Seconds = lower("Mean time that the host needed to issue <phase>.", "host mean")
    min_s: Seconds = lower("Shortest time that the host needed to issue <phase>.", "host min", over="min")
    median_s: Seconds = lower("Median time that the host needed to issue <phase>.", "host median")
    max_s: Seconds = lower("Longest time that the host needed to issue <phase>.", "host max", over="max")


@record
class Lag:
    """Phases: lag of the device behind the host."""

    min_s: Offset = about("Smallest lag of the device behind the host at the end of <phase>.", "lag min", over="min")
    median_s: Offset = about("Median lag of the device behind the host at the end of <phase>.", "lag median")
    max_s: Offset = about("Largest lag of the device behind the host at the end of <phase>.", "lag max", over="max")


@record
class PhaseSummary:
    """Phases: statistics of one phase, or of the step, over the window's full and unskipped steps."""

    n: Count = about("Number of steps in the statistics of <phase>: steps of the window that are full and not skipped.")
    mean_s: Seconds = lower("Mean time of <phase> on the device (on a CPU: the host's time).", "<phase>")
    std_s: Seconds = lower("Sample standard deviation of the time of <phase>, with n - 1 in the denominator.")
    min_s: Seconds = lower("Shortest time of <phase>.", over="min")
    p5_s: Seconds = lower("5th percentile of the time of <phase>; null below 20 steps.")
    p25_s: Seconds = lower("25th percentile of the time of <phase>, interpolated linearly.")
    median_s: Seconds = lower("Median time of <phase>.")
    p75_s: Seconds = lower("75th percentile of the time of <phase>, interpolated linearly.")
    p95_s: Seconds = lower("95th percentile of the time of <phase>; null below 20 steps.")
    p99_s: Seconds = lower("99th percentile of the time of <phase>; null below 100 steps.")
    max_s: Seconds = lower("Longest time of <phase>.", over="max")
    cv_fraction: Fraction = lower("Coefficient of variation: standard deviation divided by the mean.", "CV")
    median_low_s: Seconds = about(
        "Lower end of a confidence interval for the median within this run, from order statistics; null below 6 steps."
    )
    median_high_s: Seconds = about("Upper end of the confidence interval for the median within this run.")
    median_coverage_fraction: Fraction = about(
        "Exact confidence of the median's interval, at least 0.95, if steps are independent."
    )
    lag1_autocorrelation: Number = about("Correlation of a step's time with that of the next step; null below 3 steps.")
    outlier_count: Count = lower(
        "Steps that lie more than 3.5 robust standard deviations from the median, estimated from the median absolute "
        "deviation."
    )
    trend_fraction: Fraction = about(
        "Drift of the time from the window's start to its end, relative to the start: Theil-Sen line, its ends clamped "
        "to the values' range; null below 6 steps."
    )
    trend_p: Number = about(
        "Probability of so strong an order of the values without any trend (Kendall's test); null below 6 steps."
    )
    share_fraction: Fraction = about("Mean time of <phase> divided by the mean step time.")
    host: HostSpan = part(HostSpan)
    lag: Lag | None = None


@record
class Throughput:
    """Throughput: rates of the window."""

    tokens_per_s: TokensPerSecond = higher(
        "Tokens per second: `window.tokens` / `window.wall_s`.", "tokens/s", over="harmonic mean"
    )
    model_flops_per_s: FlopsPerSecond = higher(
        "Model FLOPs per second: tokens per second times `flops.per_token_flops`.", over="harmonic mean"
    )
    mfu_fraction: Fraction = higher(
        "Model FLOPs utilization: model FLOP/s of one device divided by its peak, with attention counted in full.",
        "MFU",
        over="harmonic mean",
    )
    mfu_causal_fraction: Fraction = higher(
        "Model FLOPs utilization with causal attention counted half, since half of its products need not be computed.",
        "causal MFU",
        over="harmonic mean",
    )
    hfu_fraction: Fraction = higher(
        "Hardware FLOPs utilization: like MFU, but including the FLOPs that activation checkpointing computes again.",
        "HFU",
        over="harmonic mean",
    )
    mfu_reason: Text = about("Why there is no MFU; null where there is one.")
    joules_per_token: Annotated[float | None, "J/token"] = lower(
        "Energy per token: `device_state.energy_j` / `window.tokens`.", "mJ/token"
    )
    price_per_token: Annotated[float | None, "1/token"] = lower(
        "Price of a token, in the currency of `measure.price_per_hour`, for the devices of all ranks."
    )

    def refuse_impossible(self) -> None:
        """Put a reason in the place of each utilization below 0 or above 100 %, which no device has."""
        for name in ("hfu_fraction", "mfu_causal_fraction", "mfu_fraction"):
            if (fraction := getattr(self, name)) is not None and not 0 <= fraction <= 1:
                setattr(self, name, None)
                self.mfu_reason = (
                    f"it would be {fraction:.1%} of the peak, which no device reaches: the peak is another product's "
                    "(flops.peak_source), FLOPs are counted twice or not needed (flops.source), or the clock is wrong"
                )


@record
class Loss:
    """Throughput: losses."""

    first: Nats = lower(
        "Loss of step 0 on rank 0. It is a warm-up step unless `window.warmup_steps` is 0.", "first loss"
    )
    last: Nats = lower("Loss of the window's last step on rank 0.", "last loss")
    mean: Nats = lower("Mean loss over the window on rank 0.", "mean loss")


class RankRecord(Struct):
    """Figures of one rank for the window.

    `mean_s` holds its mean step time and mean phase times, and `guards` those of its guards that warn or fail.
    """

    rank: int
    hostname: Text = None
    gpu_uuid: Text = None
    steps: Count = None
    tokens: Count = None
    mean_s: dict[str, float] = {}
    run_peak_allocated_bytes: Bytes = None
    steady_peak_allocated_bytes: Bytes = None
    energy_j: Joules = None
    guards: list[Guard] = []


@record
class RefusedAllocation:
    """Memory: contents of the device when an allocation failed."""

    phase: Text = about("Phase in which the allocation failed.")
    requested_bytes: Bytes = lower("Size of the allocation that failed, rounded up as the allocator rounds it.")
    allocated_bytes: Bytes = lower("Bytes allocated on the device when the allocation failed.")
    reserved_bytes: Bytes = lower("Bytes reserved by PyTorch's allocator when the allocation failed.")
    device_free_bytes: Bytes = higher("Bytes of the device that no process held when the allocation failed.")
    parameters_bytes: Bytes = lower("Part of `allocated_bytes` that parameters and buffers held.")
    gradients_bytes: Bytes = lower("Part of `allocated_bytes` that the gradients of parameters held.")
    optimizer_state_bytes: Bytes = lower("Part of `allocated_bytes` that the optimizers' state held.")
    rest_bytes: Bytes = lower("Remainder of `allocated_bytes`: activations, inputs, temporary tensors and workspaces.")
    location: Text = about("Line of code whose allocation failed, where an allocator's history has it.")


@record
class Memory:
    """Memory: peaks of the allocator and of the process."""

    run_peak_allocated_bytes: Bytes = lower(
        "Largest number of bytes allocated on the device from the run's start to the window's end: it decides whether "
        "a run fits.",
        "peak memory",
        over="max",
    )
    run_peak_reserved_bytes: Bytes = lower(
        "Largest number of bytes that PyTorch's allocator reserved from the run's start to the window's end.",
        over="max",
    )
    steady_peak_allocated_bytes: Bytes = lower(
        "Largest number of bytes allocated on the device within the window.", over="max"
    )
    steady_peak_reserved_bytes: Bytes = lower(
        "Largest number of bytes that PyTorch's allocator reserved within the window.", over="max"
    )
    phase_peak_allocated_bytes: PhaseBytes = lower(
        "Largest number of bytes allocated during <phase>, measured in probe steps.", "peak in <phase>", over="max"
    )
    phase_begin_allocated_bytes: PhaseBytes = lower(
        "Bytes allocated when <phase> begins, measured in probe steps. Before backward they include the saved "
        "activations.",
        "before <phase>",
    )
    saved_bytes: Bytes = lower(
        "Bytes that autograd saves in one forward of attention alone, without its inputs. Each storage counts once."
    )
    expected_saved_bytes: Bytes = lower(
        "Bytes that eager attention should save in one forward, by its shape: softmax's result if written out, output "
        "and logsumexp if fused; null where unknown."
    )
    device_total_bytes: Bytes = about("Total memory of the device.")
    run_alloc_retry_count: Count = lower(
        "Allocations of the run that succeeded only after the allocator had emptied its cache."
    )
    window_alloc_retry_count: Count = lower(
        "Allocations in the window that succeeded only after the allocator had emptied its cache."
    )
    window_reserved_growth_bytes: Bytes = lower(
        "Growth of the allocator's reserved memory from the window's start to its end."
    )
    initial_allocated_bytes: Bytes = lower(
        "Bytes allocated on the device before the first step: parameters, and what a strategy has made beside them.",
        "after initialization",
    )
    host_growth: Annotated[Growth, "<memory>_growth"] = part(Growth)
    reserved_growth: Annotated[Growth, "<memory>_growth"] = part(Growth)
    keeper: Text = about("What keeps the memory that grows over steps, with the line that fills it; null if unknown.")
    refused: RefusedAllocation | None = None
    host_peak_rss_bytes: Bytes = lower("Peak resident memory of the process on the host.", over="max")


@record
class DeviceReading:
    """Device state: one reading from the management library of the GPU's vendor, NVML or amdsmi."""

    read_at_s: Seconds = about("Time of the reading on the host's monotonic clock.")
    sm_clock_hz: Hertz = about("Clock rate of the GPU's multiprocessors (SM) at the window's <end>.")
    temperature_c: Celsius = about("Temperature of the GPU at the window's <end>.")
    power_w: Watts = about("Power draw of the GPU at the window's <end>.")
    energy_j: Joules = about("Energy that the GPU has used since its driver was loaded.")
    power_capped_s: Seconds = about("Total time so far during which the power cap held the clock down.")
    thermal_capped_s: Seconds = about("Total time so far during which the temperature held the clock down.")
    other_process_pids: list[int] | None = about(
        "Ids of the other processes on the GPU; null where the driver hides them."
    )
    other_process_count: Count = about("Number of other processes on the GPU; null where the driver hides them.")


@record
class DeviceState:
    """Device state: summary of the readings at the window's start and end."""

    open: Annotated[DeviceReading, "<end>"] = part(DeviceReading)
    close: Annotated[DeviceReading, "<end>"] = part(DeviceReading)
    mean_power_w: Watts = lower("Mean power between the two readings, from the GPU's energy counter.")
    mean_temperature_c: Celsius = lower(
        "Mean of the temperatures at the window's two ends. A reading in between would cost time in the window."
    )
    energy_j: Joules = lower("Energy of the window: mean power times `window.wall_s`.")
    power_capped_fraction: Fraction = lower("Share of the window during which the power cap held the clock down.")
    thermal_capped_fraction: Fraction = lower("Share of the window during which the temperature held the clock down.")
    sm_clock_drop_fraction: Fraction = lower(
        "Loss of SM clock from the window's start to its end, as a share of the clock at the start."
    )
    other_process_count: Count = lower("Number of other processes on the GPU: the larger of both readings.")


@record
class HostState:
    """Host state: load of the machine during the window; null where the system does not report it."""

    load_per_core: Number = lower(
        "Load average of the last minute at the window's end, divided by the machine's cores."
    )
    other_cpu_fraction: Fraction = lower(
        "Share of this process's cores that other processes kept busy in the window. Its child processes do not count "
        "as others."
    )
    steal_fraction: Fraction = lower(
        "Share of the cores' time in the window that the hypervisor gave to other virtual machines."
    )
    waited_fraction: Fraction = lower(
        "Share of the window during which the training thread was ready to run but had to wait for a core."
    )
    page_fault_count: Count = about("Pages that the process got from the kernel in the window, each of them zeroed.")


@record
class LagVerdict:
    """Probe steps: whether a phase waits for the host."""

    verdict: Annotated[LagWord | None, "text"] = about(
        "`host-bound`, `queued` or `mixed`: whether the device ran out of work in <phase>, by the smallest lag within "
        "it."
    )
    min_lag_s: Offset = about("Smallest lag within <phase>: the median of the probe steps.", over="min")


@record
class Communication:
    """Communication: how several ranks work together in a step; null on one rank."""

    sigterm_check_s: Seconds = lower(
        "Host time per step in Lightning's check for SIGTERM, a broadcast for each batch that the host waits for; 0 "
        "where the check is off.",
        "SIGTERM check",
    )
    sigterm_check_location: Text = about("File and line of that check; null where it is off.")
    bucket_copy_bytes: Bytes = lower(
        "Bytes of gradients that DDP copies out of its buckets in a step, because gradients are not views of them."
    )
    bucket_split_count: Count = lower(
        "Number of further graphs that came from Dynamo's splitting of graphs at DDP's buckets."
    )


class HiddenSync(Struct):
    """A place in the code where the host waited for the device."""

    location: str
    count: int
    stack: str


@record
class TrainingFacts:
    """Probe steps: whether parameters got gradients and moved."""

    parameters: Count = about("Number of trainable tensors that were checked; null if none were.")
    missing_gradients: list[str] = about(
        "Names of trainable tensors without a gradient in any of the steps checked.", factory=list
    )
    zero_gradients: list[str] = about(
        "Names of trainable tensors whose gradient is all zero in each of the steps checked.", factory=list
    )
    nonfinite_gradients: list[str] = about(
        "Names of trainable tensors whose gradient has a NaN or an infinity.", factory=list
    )
    kept_gradient_count: Count = lower(
        "Number of trainable tensors that still had the gradient of the step before when the checked step's backward "
        "pass began; null with manual optimization."
    )
    backward_count: Number = about(
        "Forward and backward passes of each batch: 1, or more with an optimizer that calls its closure several times."
    )
    unmoved_parameters: list[str] | None = about(
        "Names of trainable tensors that the optimizer's step did not change; null without an optimizer."
    )
    gradient_norm: Number = about("2-norm of all gradients, before clipping.")
    has_new_batch: Flag = about("Whether the checked step had another batch than the step before it.")
    depends_on_batch: Flag = about(
        "Whether the loss of the batch before is another one with the same weights; null if that was not tried, or if "
        "losses of 16 bits are equal."
    )
    embedded_fraction: Fraction = about(
        "Rows that the module's embeddings (nn.Embedding) look up for a batch, as a share of its tokens that count."
    )
    uncounted_fraction: Fraction = lower(
        "How many more token ids the largest nn.Embedding looks up for a batch than count as tokens, as a share of "
        "these; null where `tokens_per_batch` counts them."
    )
    is_skipped: Flag = about("Whether the fp16 scaler skipped the update of the checked step, or it had no loss.")

    @property
    def is_idle(self) -> bool:
        """Whether a step gave no parameter a gradient; never a skipped step."""
        silent_count = len(self.missing_gradients) + len(self.zero_gradients)
        return not self.is_skipped and silent_count == self.parameters


@record
class RunError:
    """Run: the exception that ended it."""

    kind: Text = about("Type of the exception that ended the run.")
    message: Text = about("Message of the exception that ended the run, in one line.")
    phase: Text = about(
        "Phase in which the exception was raised: `setup` before the first step, `recording` or `summary` for "
        "lmbench's own work."
    )
    requested_bytes: Bytes = about(
        "Bytes of the allocation that failed, if the message of an out-of-memory error tells them."
    )
    where: Text = about("`device` or `host`: whose memory ran out.")
    location: Text = about(
        "Last line of the user's code that the exception passed through: `my_module.py:31 in training_step`."
    )
    traceback_file: Text = about("File in the result folder with all frames of the exception.")
    collective: Text = about("Collective between ranks that failed, by PyTorch's flight recorder.")

    @property
    def is_incorrect(self) -> bool:
        """Whether the user's attention was found to be wrong: the speed of such a run means nothing."""
        return (self.message or "").startswith(f"{INCORRECT}: ")

    @property
    def brief(self) -> str:
        """The message, of 160 characters at most, with the type of an error whose message is a key alone."""
        message = f"{self.kind}: {self.message}" if self.kind == "KeyError" else self.message or ""
        return shorten(message, 160, placeholder=" ...")

    def ending(self, outcome: str) -> str:
        """An outcome with the phase and the message as far as they are known: `error in forward: no attribute 'x'`."""
        place = f"{outcome} in {self.phase}" if self.phase else outcome
        return f"{place}: {self.brief}" if self.message else place


@record
class Probe:
    """Probe steps: unmeasured steps after the window."""

    requested_steps: Count = about("Number of probe steps that were to measure the lag.")
    is_complete: Flag = about("Whether every kind of probe step was taken.")
    error: RunError | None = about(
        "Exception that ended the probe steps after a complete window, with the same parts as `error`."
    )
    steps: Count = about("Probe steps that measured the lag; no statistic includes them.")
    marked_modules: Count = about("Number of modules whose ends were marked in the probe steps.")
    hidden_syncs: list[HiddenSync] | None = about(
        "Places where the host waited for the device in a probe step: location, stack, count; null if not looked for."
    )
    synchronized_step_s: Seconds = about(
        "Mean time of probe steps that synchronize gradients between ranks, on rank 0; null except with DDP."
    )
    unsynchronized_step_s: Seconds = about(
        "Mean time of probe steps that do not synchronize gradients between ranks, on rank 0; null except with DDP."
    )
    verdicts: PerPhase[LagVerdict] | None = None
    training: TrainingFacts | None = None

    @property
    def lags(self) -> dict[Span, LagVerdict]:
        """The verdict on each phase that probe steps judged."""
        return dict(self.verdicts.items()) if self.verdicts else {}

    @property
    def host_bound(self) -> list[Span]:
        """The phases in which the device waits for the host."""
        return [span for span, lag in self.lags.items() if lag.verdict == "host-bound" and span != "step"]
