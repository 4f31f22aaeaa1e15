"""One step of a trace as a picture needs it: host phases and launches, kernels with phase, kind and part, in a small
file of its own, so that a page never has to read the trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from lmbench.kernels.kinds import short_name
from lmbench.kernels.trace import Trace
from lmbench.records.codec import read_packed, write_packed
from lmbench.records.intervals import NONE

TIMELINE_FILE = "timeline.json.gz"

# 2^53 ns are a hundred days, and the most that a number of the page's script holds.
_Time = Annotated[int, Meta(ge=-(2**53), le=2**53)]
_Duration = Annotated[int, Meta(ge=0, le=2**53)]


class StepKernel(Struct, array_like=True):
    """A kernel. Of one with an earlier step's launch, or none in the trace, the launch is null."""

    start_ns: _Time
    duration_ns: _Duration
    kernel: str
    kind: str
    part: str
    phase: str
    launch_ns: _Time | None
    launch_duration_ns: _Duration | None


class StepTimeline(Struct):
    """What the device did from the host's beginning of a step to the end of the step's last kernel, earlier steps' work
    included. Times are ns since the host began the step; `host_phases` are phase, start and end of its pieces."""

    schema_version: Literal[2]
    end_ns: Annotated[int, Meta(gt=0, le=2**53)]
    host_phases: list[tuple[str, _Time, _Time]]
    kernels: Annotated[list[StepKernel], Meta(min_length=1)]


def step_timeline(trace: Trace) -> StepTimeline | None:
    """The last step, whose beginning is the most like that of any other; None without kernels or steps of lmbench's."""
    kernels, line = trace.kernels, trace.timeline
    if kernels.empty or line.source != "lmbench" or not len(line.step_ns):
        return None
    begin = int(line.step_ns[-1, 0])
    is_own = (kernels.launch != NONE) & (kernels.launch_ns >= begin) & (kernels.launch_ns < line.end_ns.max())
    if not is_own.any():
        return None
    end = int(kernels.end_ns[is_own].max())
    columns = kernels.assign(
        start_ns=kernels.start_ns - begin,
        kernel=[*map(short_name, kernels.name)],
        launch_ns=(kernels.launch_ns - begin).astype(object).where(is_own, None),
        launch_duration_ns=(kernels.returned_ns - kernels.launch_ns).astype(object).where(is_own, None),
    )[[*StepKernel.__struct_fields__]]
    rows = columns[(kernels.end_ns > begin) & (kernels.start_ns < end)].itertuples(index=False, name=None)
    pieces = zip(line.phases, (line.start_ns - begin).tolist(), (line.end_ns - begin).tolist(), strict=True)
    return StepTimeline(
        schema_version=2,
        end_ns=end - begin,
        host_phases=[piece for piece in pieces if piece[2] > 0],
        kernels=[StepKernel(*row) for row in rows],
    )


def write_timeline(timeline: StepTimeline, folder: Path) -> None:
    """Write it beside run.json. Raises OSError."""
    write_packed(timeline, folder / TIMELINE_FILE)


def read_timeline(folder: Path) -> StepTimeline:
    """A run's timeline. Raises DamagedRecord, with one line, for a file that cannot be read or is none."""
    return read_packed(folder / TIMELINE_FILE, StepTimeline)
