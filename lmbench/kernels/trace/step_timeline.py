"""One step of a trace as a picture needs it: host phases and launches, kernels with phase, kind and part, in a small
file of its own, so that a page never has to read the trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from lmbench.kernels.trace.analysis import Trace
from lmbench.kernels.trace.events import NONE, Integers
from lmbench.kernels.trace.names import short_name
from lmbench.records.vocabulary import Record

TIMELINE_FILE = "timeline.json.gz"
SCHEMA_VERSION = 1
_COLUMNS = ("start_ns", "duration_ns", "name", "kind", "part", "phase", "stream", "launch_ns", "launch_duration_ns")


def step_timeline(trace: Trace) -> Record | None:
    """The last step, whose beginning is the most like that of any other; None without kernels or steps of lmbench's.

    Times are ns since the host began the step. `kernels` has columns of one value a kernel, by start; `name`, `kind`,
    `part` and `phase` are places in the lists of those names. It holds what the device did from the host's beginning of
    the step to the end of the step's last kernel, earlier steps' work included (`is_own` 0). A kernel whose launch is
    unknown or earlier has `launch_ns` null.
    """
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
    shown = np.flatnonzero((kernels.end_ns > begin) & (kernels.start_ns < end))
    names = _Places()
    kinds, parts, phases = _Places(), _Places(), _Places()
    columns: dict[str, list[Any]] = {name: [] for name in (*_COLUMNS, "is_own")}
    for index in shown.tolist():
        is_own = bool(own[index])
        row = (
            int(kernels.start_ns[index]) - begin, int(kernels.end_ns[index] - kernels.start_ns[index]),
            names.of(short_name(kernels.names[index])), kinds.of(kernels.kinds[index]), parts.of(kernels.parts[index]),
            phases.of(kernels.phases[index]), int(kernels.stream[index]),
            int(launch_start[index]) - begin if is_own else None,
            int(launch_end[index] - launch_start[index]) if is_own else None, int(is_own),
        )  # fmt: skip
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    return {
        "schema_version": SCHEMA_VERSION,
        "end_ns": end - begin,
        "host_phases": _host_phases(trace, begin),
        "names": names.found,
        "kinds": kinds.found,
        "parts": parts.found,
        "phases": phases.found,
        "kernels": columns,
    }


class _Places:
    """Each text once, by its place."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._place: dict[str, int] = {}

    def of(self, text: str) -> int:
        if text not in self._place:
            self._place[text] = len(self.found)
            self.found.append(text)
        return self._place[text]


def _of_launch(times: Integers, launch: Integers) -> Integers:
    """Each kernel's launch's time, NONE where it has none."""
    if not len(times):
        return np.full(len(launch), NONE, dtype=np.int64)
    return np.where(launch != NONE, times[launch], NONE)


def _host_phases(trace: Trace, begin: int) -> list[list[Any]]:
    """Phase, start and end of the step's pieces on the host."""
    line = trace.timeline
    return [
        [phase, int(start) - begin, int(end) - begin]
        for phase, start, end in zip(line.phases, line.start_ns, line.end_ns, strict=True)
        if end > begin
    ]


def write_timeline(timeline: Record, folder: Path) -> None:
    """Write it beside run.json. Raises OSError."""
    text = json.dumps(timeline, separators=(",", ":")).encode()
    # No time stamp: the same trace gives the same file.
    (folder / TIMELINE_FILE).write_bytes(gzip.compress(text, mtime=0))


def read_timeline(folder: Path) -> Record | None:
    """A run's timeline; None where there is none that can be read."""
    try:
        found = json.loads(gzip.decompress((folder / TIMELINE_FILE).read_bytes()))
    except (OSError, EOFError, ValueError, RecursionError):
        return None
    is_known = isinstance(found, dict) and found.get("schema_version") == SCHEMA_VERSION
    return found if is_known else None
