# ruff: noqa: E501 (tables, one field a line)
# fmt: off
"""A step record: one line of steps.jsonl; and which of a run's steps statistics rest on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, TypeAlias, get_type_hints

from msgspec import Struct, defstruct

from lmbench.records.field import Count, Flag, Scalar, Seconds
from lmbench.records.vocabulary import Border, Span, Stage

HostSeconds: TypeAlias = Annotated[Seconds, "<phase> (host)", "Wall time the host needed to issue <phase>.", "down", "<phase>_host_s"]
LagSeconds: TypeAlias = Annotated[Seconds, "lag at <border>'s end", "How far the device is behind the host at the end of <border>: near zero the device waits for the host. Null on a CPU.", None, "lag_<border>_s"]


class StepRecord(Struct):
    """Step records: one optimizer step, all its micro-batches included."""

    step: Annotated[int | None, "index", "step", "Index of the optimizer step, from 0, warm-up included."] = None
    stage: Annotated[Stage | None, "text", "stage", "`warmup` or `window`."] = None
    is_warmup: Annotated[Flag, "warm-up", "The step came before the window and is in no statistic."] = None
    micro_batches: Annotated[Count, "micro-batches", "Micro-batches of this step; the last group of an epoch can be short."] = None
    tokens: Annotated[Count, "tokens", "Tokens of all micro-batches of this rank."] = None
    loss: Annotated[float | None, "nat", "loss", "Mean loss over the micro-batches, as `training_step` returned it.", "down"] = None
    gradient_norm: Annotated[float | None, Scalar("1", "gradient norm", "2-norm of all gradients before clipping, without the loss scale; recorded where `measure.gradient_norm` asks for it.", fold="norm")] = None
    is_skipped: Annotated[Flag, "skipped", "The fp16 scaler skipped the update; the step is in no statistic."] = None
    excluded_s: Annotated[Seconds, "excluded", "Validation, checkpoints and record writing between this step and the one before; already subtracted."] = None
    rank: Annotated[int | None, "index", "rank", "Rank of the process that measured."] = None
    nonfinite: Annotated[dict[str, str], "tree", "non-finite", "Names and values (`nan`, `inf`, `-inf`) of fields stored as null for that reason."] = {}
    step_s: Annotated[Seconds, "step", "From the end of the last step's last batch to the end of this one's, exclusions subtracted.", "down"] = None
    data_s: Annotated[Seconds, "data", "Waiting for the loader.", "down"] = None
    transfer_s: Annotated[Seconds, "transfer", "Copying the batch from host to device.", "down"] = None
    forward_s: Annotated[Seconds, "forward", "`training_step`, the loss included.", "down"] = None
    backward_s: Annotated[Seconds, "backward", "The backward pass.", "down"] = None
    clip_s: Annotated[Seconds, "clip", "Gradient clipping, and the gradient norm where it is recorded.", "down"] = None
    optimizer_s: Annotated[Seconds, "optimizer", "The parameter update.", "down"] = None
    zero_grad_s: Annotated[Seconds, "zero_grad", "Zeroing the gradients.", "down"] = None
    other_s: Annotated[Seconds, "other", "The remainder of `step_s`: the framework between the phases.", "down"] = None
    step_host_s: HostSeconds = None
    data_host_s: HostSeconds = None
    transfer_host_s: HostSeconds = None
    forward_host_s: HostSeconds = None
    backward_host_s: HostSeconds = None
    clip_host_s: HostSeconds = None
    optimizer_host_s: HostSeconds = None
    zero_grad_host_s: HostSeconds = None
    other_host_s: HostSeconds = None
    lag_data_s: LagSeconds = None
    lag_transfer_s: LagSeconds = None
    lag_forward_s: LagSeconds = None
    lag_backward_s: LagSeconds = None
    lag_clip_s: LagSeconds = None
    lag_optimizer_s: LagSeconds = None
    lag_zero_grad_s: LagSeconds = None
    lag_step_s: LagSeconds = None

    def span_s(self, span: Span) -> float | None:
        """Device span of a phase or of the whole step."""
        found: float | None = getattr(self, f"{span}_s")
        return found

    def host_s(self, span: Span) -> float | None:
        """Host span of a phase or of the whole step."""
        found: float | None = getattr(self, f"{span}_host_s")
        return found

    def lag_s(self, border: Border) -> float | None:
        """Lag at the end of a phase or of the step."""
        found: float | None = getattr(self, f"lag_{border}_s")
        return found


@dataclass(frozen=True)
class WindowSteps:
    """The window's step records: those that enter statistics, and how many do not and why."""

    used: list[StepRecord]
    micro_batches: int | None
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
    return WindowSteps(used, full, len(window) - len(kept), len(kept) - len(used))


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
            (name, Annotated[float | None, replace(about, title=f"mean {about.title}", meaning=f"Mean over the window: {about.meaning}")], None)
            for name, about in SCALARS.items()
        ],
        namespace={"__doc__": "Scalars: means over the window's steps of what callbacks logged."},
        module=__name__,
    )
