"""One step of a trace as a picture needs it: host phases and launches, kernels with phase, kind and part, in a small
file of its own, so that a page never has to read the trace."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from lmbench.files import Unreadable, read_unpacked
from lmbench.kernels.kinds import short_name
from lmbench.kernels.trace import Trace
from lmbench.records.codec import DamagedRecord, decode
from lmbench.records.intervals import NONE

TIMELINE_FILE = "timeline.json.gz"
#: Unpacked; a kernel takes 60 bytes, and ten times that in memory.
MAX_TIMELINE_BYTES = 32 * 2**20

# 2^53 ns are a hundred days, and the most that a number of the page's script holds.
_Time = Annotated[int, Meta(ge=-(2**53), le=2**53)]
_Duration = Annotated[int, Meta(ge=0, le=2**53)]
_Place = Annotated[int, Meta(ge=0)]


class TimelineKernels(Struct):
    """Columns of one value a kernel, by start; `name`, `kind`, `part` and `phase` are places in the lists of those
    names. A kernel with an earlier step's launch, or none in the trace, has `launch_ns` null and `is_own` 0."""

    start_ns: list[_Time]
    duration_ns: list[_Duration]
    name: list[_Place]
    kind: list[_Place]
    part: list[_Place]
    phase: list[_Place]
    stream: list[_Time]
    launch_ns: list[_Time | None]
    launch_duration_ns: list[_Duration | None]
    is_own: list[_Time]


class StepTimeline(Struct):
    """What the device did from the host's beginning of a step to the end of the step's last kernel, earlier steps' work
    included. Times are ns since the host began the step; `host_phases` are phase, start and end of its pieces."""

    schema_version: Literal[1]
    end_ns: Annotated[int, Meta(gt=0, le=2**53)]
    host_phases: list[tuple[str, _Time, _Time]]
    names: list[str]
    kinds: list[str]
    parts: list[str]
    phases: list[str]
    kernels: TimelineKernels


def step_timeline(trace: Trace) -> StepTimeline | None:
    """The last step, whose beginning is the most like that of any other; None without kernels or steps of lmbench's."""
    starts, kernels, launches, line = trace.timeline.step_start_ns, trace.kernels, trace.events.launches, trace.timeline
    if not len(kernels) or not len(starts):
        return None
    begin = int(starts[-1])
    # Behind the launches stands what a kernel without a launch has.
    launch_start, launch_end = (np.append(ns, NONE)[kernels.launch] for ns in (launches.start_ns, launches.end_ns))
    is_own = kernels.is_linked & (launch_start >= begin) & (launch_start < line.end_ns.max())
    if not is_own.any():
        return None
    end = int(kernels.events.end_ns[is_own].max())
    rows = np.flatnonzero((kernels.events.end_ns > begin) & (kernels.events.start_ns < end)).tolist()

    def listed(texts: Sequence[str]) -> tuple[list[str], list[int]]:
        """Each text once, and the place of every kernel's among them."""
        place = {text: index for index, text in enumerate(dict.fromkeys(texts[row] for row in rows))}
        return list(place), [place[texts[row]] for row in rows]

    names, name = listed([short_name(text) for text in kernels.events.names])
    kinds, kind = listed(kernels.kinds)
    parts, part = listed(kernels.parts)
    phases, phase = listed(kernels.phases)
    columns = TimelineKernels(
        start_ns=(kernels.events.start_ns[rows] - begin).tolist(),
        duration_ns=kernels.duration_ns[rows].tolist(),
        name=name,
        kind=kind,
        part=part,
        phase=phase,
        stream=kernels.events.stream[rows].tolist(),
        launch_ns=[int(launch_start[row]) - begin if is_own[row] else None for row in rows],
        launch_duration_ns=[int(launch_end[row] - launch_start[row]) if is_own[row] else None for row in rows],
        is_own=is_own[rows].astype(int).tolist(),
    )
    host_phases = [
        (str(phase), int(start) - begin, int(end) - begin)
        for phase, start, end in zip(line.phases, line.start_ns, line.end_ns, strict=True)
        if end > begin
    ]
    return StepTimeline(1, end - begin, host_phases, names, kinds, parts, phases, columns)


def write_timeline(timeline: StepTimeline, folder: Path) -> None:
    """Write it beside run.json. Raises OSError."""
    # No time stamp: the same trace gives the same file.
    (folder / TIMELINE_FILE).write_bytes(gzip.compress(msgspec.json.encode(timeline), mtime=0))


def read_timeline(folder: Path) -> StepTimeline:
    """A run's timeline. Raises DamagedRecord, with one line, for a file that cannot be read or is none."""
    try:
        text = read_unpacked(folder / TIMELINE_FILE, MAX_TIMELINE_BYTES)
    except Unreadable as error:
        raise DamagedRecord(f"{TIMELINE_FILE} is not read: {error}") from error
    try:
        timeline = decode(text, StepTimeline)
    except DamagedRecord as error:
        raise DamagedRecord(f"it is no timeline of one step: {error}") from error
    kernels = timeline.kernels
    columns = [getattr(kernels, name) for name in TimelineKernels.__struct_fields__]
    if not kernels.start_ns or len({len(column) for column in columns}) > 1:
        raise DamagedRecord("it is no timeline of one step: its columns of kernels are empty, or not of one length")
    for name in ("name", "kind", "part", "phase"):
        if max(getattr(kernels, name)) >= len(getattr(timeline, f"{name}s")):
            raise DamagedRecord(f"a kernel has none of its {name}s")
    return timeline
