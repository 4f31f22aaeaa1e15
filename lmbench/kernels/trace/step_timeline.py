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
from lmbench.kernels.trace.events import NONE, Integers
from lmbench.kernels.trace.kernels import Trace
from lmbench.kernels.trace.kinds import short_name
from lmbench.records.codec import DamagedRecord, decode

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
    starts = trace.timeline.step_start_ns
    if not trace.events.has_kernels or not len(starts):
        return None
    begin = int(starts[-1])
    kernels = trace.kernels
    launch_start = _of_launch(trace.events.launches.start_ns, kernels.launch)
    launch_end = _of_launch(trace.events.launches.end_ns, kernels.launch)
    own = (launch_start >= begin) & (launch_start < trace.timeline.end_ns.max())
    if not own.any():
        return None
    end = int(kernels.end_ns[own].max())
    shown = np.flatnonzero((kernels.end_ns > begin) & (kernels.start_ns < end)).tolist()
    launched = [(int(launch_start[i]) - begin, int(launch_end[i] - launch_start[i])) if own[i] else None for i in shown]
    names, name = _places([short_name(kernels.names[index]) for index in shown])
    kinds, kind = _places([kernels.kinds[index] for index in shown])
    parts, part = _places([kernels.parts[index] for index in shown])
    phases, phase = _places([kernels.phases[index] for index in shown])
    columns = TimelineKernels(
        start_ns=(kernels.start_ns[shown] - begin).tolist(),
        duration_ns=kernels.duration_ns[shown].tolist(),
        name=name,
        kind=kind,
        part=part,
        phase=phase,
        stream=kernels.stream[shown].tolist(),
        launch_ns=[one[0] if one else None for one in launched],
        launch_duration_ns=[one[1] if one else None for one in launched],
        is_own=own[shown].astype(int).tolist(),
    )
    line = trace.timeline
    host_phases = [
        (str(phase), int(start) - begin, int(end) - begin)
        for phase, start, end in zip(line.phases, line.start_ns, line.end_ns, strict=True)
        if end > begin
    ]
    return StepTimeline(1, end - begin, host_phases, names, kinds, parts, phases, columns)


def _places(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """Each text once, and the place of every one among them."""
    place = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    return list(place), [place[text] for text in texts]


def _of_launch(times: Integers, launch: Integers) -> Integers:
    """Each kernel's launch's time, NONE where it has none."""
    if not len(times):
        return np.full(len(launch), NONE, dtype=np.int64)
    return np.where(launch != NONE, times[launch], NONE)


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
    for name, places, listed in (
        ("names", kernels.name, timeline.names),
        ("kinds", kernels.kind, timeline.kinds),
        ("parts", kernels.part, timeline.parts),
        ("phases", kernels.phase, timeline.phases),
    ):
        if max(places) >= len(listed):
            raise DamagedRecord(f"a kernel has none of its {name}")
    return timeline
