"""Step records, the lines of steps.jsonl, and the selection of steps that enter statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from lmbench.records.field import (
    Bytes,
    Celsius,
    Count,
    Flag,
    Hertz,
    Index,
    Nats,
    Number,
    Offset,
    Seconds,
    about,
    lower,
    record,
)
from lmbench.records.vocabulary import Stage


def _host_time() -> Any:
    return lower("Time that the host needed to issue <phase>.", pattern="<phase>_host_s")


def _lag() -> Any:
    return about(
        "Lag of the device behind the host at the end of <border>. Near zero, the device waits for the host. Null on a "
        "CPU.",
        pattern="lag_<border>_s",
    )


@record
class StepRecord:
    """Step records: one optimizer step with all its micro-batches, timed on the device (on a CPU: on the host)."""

    step: Index = about("Index of the optimizer step, from 0, including warm-up.")
    stage: Annotated[Stage | None, "text"] = about("Part of the run: `warmup` or `window`.")
    is_warmup: Flag = about("Whether the step came before the window; no statistic includes such steps.")
    micro_batches: Count = about("Number of micro-batches of this step. The last step of an epoch can have fewer.")
    tokens: Count = about("Tokens of all micro-batches of this rank.")
    loss: Nats = lower("Mean loss over the rank's micro-batches, as `training_step` returned it.")
    gradient_norm: Number = about(
        "2-norm of all gradients before clipping, without the loss scale; recorded with `measure.gradient_norm`."
    )
    is_skipped: Flag = about(
        "Whether the fp16 scaler or a missing loss skipped the update; no statistic includes such steps."
    )
    excluded_s: Seconds = about(
        "Time between this step and the one before for validation, checkpoints and writing records; already subtracted."
    )
    checkpoint_s: Seconds = lower("Part of `excluded_s` in which a checkpoint was saved; null without one.")
    validation_s: Seconds = lower("Part of `excluded_s` in which a validation ran; null without one.")
    is_saving: Flag = about(
        "Whether a checkpoint was being written in the background when the step began; null if not."
    )
    host_bytes: Bytes = lower(
        "Memory of the process alone (resident, not shared) at the step's end; read each 50 ms at most.", over="max"
    )
    reserved_bytes: Bytes = lower(
        "Memory that PyTorch's allocator had reserved at the step's end; read each 50 ms at most.", over="max"
    )
    gc_s: Seconds = lower("Part of `step_s` in which Python collected garbage; null without a collection.")
    sm_clock_hz: Hertz = about("Clock rate of the GPU's multiprocessors; read each 10 s at most.")
    temperature_c: Celsius = about("Temperature of the GPU; read each 10 s at most.")
    turn: Index = about("Turn of the window in which the step was taken; null where no other process took turns.")
    scalars: dict[str, Number] = about(
        "Numbers of the step by name, which callbacks of yours or `self.log` of your module logged.", factory=dict
    )
    follows_loader_end: Flag = about("Whether the loader ended before the step, so that the step has its restart.")
    rank: Index = about("Rank of the process that measured.")
    nonfinite: dict[str, str] = about(
        "Names and values (`nan`, `inf`, `-inf`) of fields that are null because JSON has no such numbers.",
        factory=dict,
    )
    step_s: Seconds = lower(
        "Time from the end of the previous step's last batch to the end of this step's last batch, less `excluded_s`."
    )
    data_s: Seconds = lower("Time spent waiting for the data loader, its restart included.")
    transfer_s: Seconds = lower("Time to copy the batch from host to device.")
    forward_s: Seconds = lower(
        "Time of `training_step`, including the loss. Over several ranks it includes communication. In each "
        "micro-batch `ddp` broadcasts buffers, `fsdp2` all-gathers by block, and `tensor_parallel` does two "
        "all-reduces per block."
    )
    backward_s: Seconds = lower(
        "Time of the backward pass. Over several ranks it includes communication. `ddp` all-reduces by bucket in the "
        "last micro-batch; in each micro-batch `fsdp2` all-gathers and reduce-scatters by block, and `tensor_parallel` "
        "does two all-reduces per block."
    )
    clip_s: Seconds = lower(
        "Time of gradient clipping, and of the gradient norm where it is recorded. `fsdp2` and `tensor_parallel` add "
        "an all-reduce."
    )
    optimizer_s: Seconds = lower("Time of the parameter update.")
    zero_grad_s: Seconds = lower("Time to zero the gradients.")
    other_s: Seconds = lower(
        "Remainder of `step_s`: time between the phases, in hooks of callbacks and of the module, in loggers and in "
        "Lightning's own loop; `host_time.owners` says whose it is. Over several ranks it includes Lightning's "
        "broadcast in each micro-batch."
    )
    step_host_s: Seconds = _host_time()
    data_host_s: Seconds = _host_time()
    transfer_host_s: Seconds = _host_time()
    forward_host_s: Seconds = _host_time()
    backward_host_s: Seconds = _host_time()
    clip_host_s: Seconds = _host_time()
    optimizer_host_s: Seconds = _host_time()
    zero_grad_host_s: Seconds = _host_time()
    other_host_s: Seconds = _host_time()
    lag_data_s: Offset = _lag()
    lag_transfer_s: Offset = _lag()
    lag_forward_s: Offset = _lag()
    lag_backward_s: Offset = _lag()
    lag_clip_s: Offset = _lag()
    lag_optimizer_s: Offset = _lag()
    lag_zero_grad_s: Offset = _lag()
    lag_step_s: Offset = _lag()


def select_window(records: Iterable[StepRecord]) -> list[StepRecord]:
    """Select the steps that enter statistics: of stage `window`, full, and not skipped by the fp16 scaler.

    A full step has as many micro-batches as the window's longest step.
    """
    window = [record for record in records if record.stage == "window"]
    longest = max((record.micro_batches or 0 for record in window), default=0)
    return [record for record in window if not record.is_skipped and record.micro_batches in (None, longest)]


def values_of(steps: Iterable[StepRecord], name: str) -> list[float]:
    """Values of a field in the steps that have it."""
    return [value for step in steps if (value := getattr(step, name)) is not None]


#: The scalar that `session.log_scalar` is given and that is a field of StepRecord; all others are in its `scalars`.
GRADIENT_NORM = "gradient_norm"
