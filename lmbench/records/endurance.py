"""What a long training suffers from beside its steps: memory that grows, checkpoints, and changes of pace."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Struct

from lmbench.records.field import Bytes, Count, Fraction, Seconds, Text, about, lower, record

_BytesPerStep: TypeAlias = Annotated[float | None, "bytes/step"]

#: Growth below both is no leak: pages of libraries that are touched late, and the step records that lmbench keeps.
_STEP_LIMIT_BYTES, _WINDOW_LIMIT_BYTES = 16 * 2**10, 4 * 2**20
#: Fields of step records that stand beside a change of pace.
BESIDE = ("sm_clock_hz", "temperature_c", "host_bytes", "reserved_bytes", "gc_s")


@record
class Growth:
    """Memory: growth over the window's steps."""

    bytes_per_step: _BytesPerStep = lower(
        "Growth per step of the process's own memory (`host_growth`), or of the allocator's reserved memory "
        "(`reserved_growth`): Theil-Sen slope; null below 12 readings."
    )
    low_bytes_per_step: _BytesPerStep = about(
        "Lower end of the slope's 95 % interval, in the half of the window where it is lower: growth that ends is no "
        "leak."
    )


@record
class Collector:
    """Host state: collections of garbage by Python."""

    count: Count = lower("Collections within the window.")
    total_s: Seconds = lower("Time of the window's collections.")
    full_s: Seconds = lower(
        "Time of the collection of all objects before the window. The window's collections skip these frozen objects."
    )
    location: Text = about("Line of code that called the collector most often; null where only Python called it.")


@record
class Saving:
    """Saving: checkpoints within the window, and their effect on the steps after them."""

    count: Count = about("Checkpoints that were saved within the window.")
    interval_steps: Annotated[float | None, "count"] = about(
        "Mean number of steps from one checkpoint to the next.", "every"
    )
    checkpoint_bytes: Bytes = lower("Size of the last checkpoint, a file or a folder.", "size")
    blocked_s: Seconds = lower("Mean time that a checkpoint keeps the training from its next step.", "blocked")
    written_s: Seconds = lower("Mean time until a checkpoint of the run is written, also in the background.", "written")
    written_bytes_per_s: Annotated[float | None, "bytes/s"] = about(
        "Size of a checkpoint divided by the time until it is written.", "rate"
    )
    slowed_fraction: Fraction = lower(
        "How much longer steps take while a checkpoint is written in the background than the steps before and after "
        "them: mean of the logarithms of one ratio per checkpoint; null below two.",
        "slowed",
    )
    slowed_interval: list[float] | None = about("95 % interval of `slowed_fraction`, by Student's t.")
    cost_fraction: Fraction = lower(
        "Time that checkpoints add to the training, blocked and by slower steps, as a share of the steps' own time.",
        "cost",
    )
    cost_interval: list[float] | None = about("95 % interval of `cost_fraction`; null below two whole intervals.")


class StepChange(Struct):
    """A change of the step time within the window: its step, the ratio with its 95 % interval, and what else changed.

    `before` and `after` have the means of `BESIDE` in the steps of the two levels.
    """

    step: int
    after_s: float
    ratio: float
    low: float
    high: float
    before: dict[str, float] = {}
    after: dict[str, float] = {}


def leak_limit(step_count: int) -> float:
    """The growth in bytes per step above which memory leaks, in a window of so many steps."""
    return max(_STEP_LIMIT_BYTES, _WINDOW_LIMIT_BYTES / step_count)
