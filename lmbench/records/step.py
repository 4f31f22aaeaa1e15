# ruff: noqa: E501 (tables, one field a line)
"""Step records, the lines of steps.jsonl, and the selection of steps that enter statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, get_type_hints

from msgspec import Struct, defstruct

from lmbench.records.field import Count, Flag, Index, Nats, Scalar, Seconds
from lmbench.records.vocabulary import Stage


class StepRecord(Struct):
    """Step records: one optimizer step with all its micro-batches, timed on the device (on a CPU: on the host).

    Attributes:
        step: step. Index of the optimizer step, from 0, including warm-up.
        stage: stage. Part of the run: `warmup` or `window`.
        is_warmup: warm-up. Whether the step came before the window; no statistic includes such steps.
        micro_batches: micro-batches. Number of micro-batches of this step. The last step of an epoch can have fewer.
        tokens: tokens. Tokens of all micro-batches of this rank.
        loss: loss (lower is better). Mean loss over the micro-batches, as `training_step` returned it.
        is_skipped: skipped. Whether the fp16 scaler or a missing loss skipped the update; no statistic includes such steps.
        excluded_s: excluded. Time between this step and the one before for validation, checkpoints and writing records; already subtracted.
        rank: rank. Rank of the process that measured.
        nonfinite: non-finite. Names and values (`nan`, `inf`, `-inf`) of fields that are null because JSON has no such numbers.
        step_s: step (lower is better). Time from the end of the previous step's last batch to the end of this step's last batch, less `excluded_s`.
        data_s: data (lower is better). Time spent waiting for the data loader.
        transfer_s: transfer (lower is better). Time to copy the batch from host to device.
        forward_s: forward (lower is better). Time of `training_step`, including the loss. Over several ranks it includes communication. In each micro-batch `ddp` broadcasts buffers, `fsdp2` all-gathers by block, and `tensor_parallel` does two all-reduces per block.
        backward_s: backward (lower is better). Time of the backward pass. Over several ranks it includes communication. `ddp` all-reduces by bucket in the last micro-batch; in each micro-batch `fsdp2` all-gathers and reduce-scatters by block, and `tensor_parallel` does two all-reduces per block.
        clip_s: clip (lower is better). Time of gradient clipping, and of the gradient norm where it is recorded. `fsdp2` and `tensor_parallel` add an all-reduce.
        optimizer_s: optimizer (lower is better). Time of the parameter update.
        zero_grad_s: zero_grad (lower is better). Time to zero the gradients.
        other_s: other (lower is better). Remainder of `step_s`: the framework's time between the phases. Over several ranks it includes Lightning's broadcast in each micro-batch.
        <phase>_host_s: <phase> (host) (lower is better). Time that the host needed to issue <phase>.
        lag_<border>_s: lag at <border>'s end. Lag of the device behind the host at the end of <border>. Near zero, the device waits for the host. Null on a CPU.
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
            "2-norm of all gradients before clipping, without the loss scale; recorded with `measure.gradient_norm`.",
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
    """The window's step records that enter statistics, and the numbers of those left out.

    `skipped_count` steps were skipped by the fp16 scaler, `short_count` steps had too few micro-batches.
    """

    used: list[StepRecord]
    skipped_count: int
    short_count: int


def select_window(records: Iterable[StepRecord], micro_batches: int | None = None) -> WindowSteps:
    """Select the steps that enter statistics: of stage `window`, full, and not skipped by the fp16 scaler.

    A full step has `micro_batches`; by default as many as the window's longest step.
    """
    window = [record for record in records if record.stage == "window"]
    if micro_batches is None:
        counts = (record.micro_batches for record in window if record.micro_batches is not None)
        micro_batches = max(counts, default=None)
    updated = [record for record in window if not record.is_skipped]
    used = [record for record in updated if micro_batches is None or record.micro_batches in (None, micro_batches)]
    return WindowSteps(used, len(window) - len(updated), len(updated) - len(used))


#: Declarations of the scalars that callbacks log by `session.log_scalar`, by name.
SCALARS: dict[str, Scalar] = {
    name: metadata
    for name, hint in get_type_hints(StepRecord, include_extras=True).items()
    for metadata in getattr(hint, "__metadata__", ())
    if isinstance(metadata, Scalar)
}

if TYPE_CHECKING:

    class ScalarMeans(Struct):
        """Scalars: means over the window's steps, with a field for each name in SCALARS."""

else:
    ScalarMeans = defstruct(
        "ScalarMeans",
        [
            (
                name,
                Annotated[
                    float | None,
                    replace(scalar, title=f"mean {scalar.title}", meaning=f"Mean over the window: {scalar.meaning}"),
                ],
                None,
            )
            for name, scalar in SCALARS.items()
        ],
        namespace={"__doc__": "Scalars: values that callbacks logged, as means over the window's steps."},
        module=__name__,
    )
