# ruff: noqa: E501 (tables, one field a line)
"""A step record: one line of steps.jsonl; and which of a run's steps statistics rest on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, get_type_hints

from msgspec import Struct, defstruct

from lmbench.records.field import Count, Flag, Index, Nats, Scalar, Seconds
from lmbench.records.vocabulary import Stage


class StepRecord(Struct):
    """Step records: one optimizer step, all its micro-batches included.

    Attributes:
        step: step. Index of the optimizer step, from 0, warm-up included.
        stage: stage. `warmup` or `window`.
        is_warmup: warm-up. The step came before the window and is in no statistic.
        micro_batches: micro-batches. Micro-batches of this step; the last group of an epoch can be short.
        tokens: tokens. Tokens of all micro-batches of this rank.
        loss: loss (lower is better). Mean loss over the micro-batches, as `training_step` returned it.
        is_skipped: skipped. The fp16 scaler skipped the update; the step is in no statistic.
        excluded_s: excluded. Validation, checkpoints and record writing between this step and the one before; already subtracted.
        rank: rank. Rank of the process that measured.
        nonfinite: non-finite. Names and values (`nan`, `inf`, `-inf`) of fields stored as null for that reason.
        step_s: step (lower is better). From the end of the last step's last batch to the end of this one's, exclusions subtracted.
        data_s: data (lower is better). Waiting for the loader.
        transfer_s: transfer (lower is better). Copying the batch from host to device.
        forward_s: forward (lower is better). `training_step`, the loss included. Over several ranks also: `ddp` its broadcast of buffers, `fsdp2` all-gathers by block, `tensor_parallel` two all-reduces a block, in each micro-batch.
        backward_s: backward (lower is better). The backward pass. Over several ranks also: `ddp` all-reduces by bucket in the last micro-batch, `fsdp2` all-gathers and reduce-scatters by block and `tensor_parallel` two all-reduces a block in each.
        clip_s: clip (lower is better). Gradient clipping, and the gradient norm where it is recorded. With `fsdp2` and `tensor_parallel` an all-reduce.
        optimizer_s: optimizer (lower is better). The parameter update.
        zero_grad_s: zero_grad (lower is better). Zeroing the gradients.
        other_s: other (lower is better). The remainder of `step_s`: the framework between the phases; over several ranks Lightning's broadcast, in each micro-batch.
        <phase>_host_s: <phase> (host) (lower is better). Wall time the host needed to issue <phase>.
        lag_<border>_s: lag at <border>'s end. How far the device is behind the host at the end of <border>: near zero the device waits for the host. Null on a CPU.
    """

    step: Index = None
    stage: Annotated[Stage | None, "text"] = None
    is_warmup: Flag = None
    micro_batches: Count = None
    tokens: Count = None
    loss: Nats = None
    gradient_norm: Annotated[
        float | None,
        Scalar(
            "1",
            "gradient norm",
            "2-norm of all gradients before clipping, without the loss scale; recorded where `measure.gradient_norm` asks for it.",
            fold="norm",
        ),
    ] = None
    is_skipped: Flag = None
    excluded_s: Seconds = None
    rank: Index = None
    nonfinite: dict[str, str] = {}
    step_s: Seconds = None
    data_s: Seconds = None
    transfer_s: Seconds = None
    forward_s: Seconds = None
    backward_s: Seconds = None
    clip_s: Seconds = None
    optimizer_s: Seconds = None
    zero_grad_s: Seconds = None
    other_s: Seconds = None
    step_host_s: Seconds = None
    data_host_s: Seconds = None
    transfer_host_s: Seconds = None
    forward_host_s: Seconds = None
    backward_host_s: Seconds = None
    clip_host_s: Seconds = None
    optimizer_host_s: Seconds = None
    zero_grad_host_s: Seconds = None
    other_host_s: Seconds = None
    lag_data_s: Seconds = None
    lag_transfer_s: Seconds = None
    lag_forward_s: Seconds = None
    lag_backward_s: Seconds = None
    lag_clip_s: Seconds = None
    lag_optimizer_s: Seconds = None
    lag_zero_grad_s: Seconds = None
    lag_step_s: Seconds = None


@dataclass(frozen=True)
class WindowSteps:
    """The window's step records: those that enter statistics, and how many do not and why."""

    used: list[StepRecord]
    skipped_count: int
    short_count: int


def select_window(records: Iterable[StepRecord], micro_batches: int | None = None) -> WindowSteps:
    """The steps that statistics rest on: of stage `window`, full, and not skipped by the scaler.

    A full step has `micro_batches`; where that is not given, as many as the window's longest step.
    """
    window = [record for record in records if record.stage == "window"]
    counts = [record.micro_batches for record in window if record.micro_batches is not None]
    full = micro_batches if micro_batches is not None else max(counts, default=None)
    kept = [record for record in window if not record.is_skipped]
    used = [record for record in kept if full is None or record.micro_batches in (None, full)]
    return WindowSteps(used, len(window) - len(kept), len(kept) - len(used))


#: The scalars that callbacks log by `session.log_scalar`: name and declaration.
SCALARS: dict[str, Scalar] = {
    name: note
    for name, hint in get_type_hints(StepRecord, include_extras=True).items()
    for note in getattr(hint, "__metadata__", ())
    if isinstance(note, Scalar)
}

if TYPE_CHECKING:

    class ScalarMeans(Struct):
        """Scalars: means over the window's steps, a field for each of SCALARS."""

else:
    ScalarMeans = defstruct(
        "ScalarMeans",
        [
            (
                name,
                Annotated[
                    float | None,
                    replace(about, title=f"mean {about.title}", meaning=f"Mean over the window: {about.meaning}"),
                ],
                None,
            )
            for name, about in SCALARS.items()
        ],
        namespace={"__doc__": "Scalars: means over the window's steps of what callbacks logged."},
        module=__name__,
    )
