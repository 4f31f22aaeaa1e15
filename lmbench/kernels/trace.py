"""A trace, read and attributed: every kernel with its launch, phase, kind and part, from which all else is computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from lmbench.kernels.collectives import describe
from lmbench.kernels.compiled import parts_in_graphs, read_graphs
from lmbench.kernels.events import Events, TraceEvents, read_trace
from lmbench.kernels.host import Host
from lmbench.kernels.kinds import kind_of
from lmbench.kernels.parts import UNCLASSIFIED
from lmbench.kernels.phases import UNLINKED, PhaseTimeline, find_phases
from lmbench.kernels.recorded import TRACE_FILE, TraceNotes
from lmbench.records.intervals import NONE, Integers
from lmbench.records.load import Run, is_run_folder, load_run
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.store import RUN_FILE
from lmbench.records.vocabulary import DAMAGED


@dataclass(frozen=True)
class Trace:
    """All that is known of a trace; `run` is None for a bare trace file.

    `kernels` has a row for each kernel, copy and fill, by start, with the columns of an event and `duration_ns`,
    `launch`, `phase`, `kind`, `part` and `is_counted`. `launch` is an index into the launches, NONE where the trace has
    none: in which phase the host started that kernel is then unknown, and its phase is `unlinked`. The launch is from
    `launch_ns` to `returned_ns` on `thread`; for a kernel without one its own start and the main thread stand there.
    `around` is the innermost operator or module range then, NONE where there is none. `is_counted` are those that the
    traced steps launched; what was queued before the trace began is not theirs.
    """

    path: Path
    run: Run | None
    notes: TraceNotes
    events: TraceEvents
    host: Host
    timeline: PhaseTimeline
    kernels: pd.DataFrame

    @property
    def record(self) -> RunRecord:
        """The run's record; every field None where the trace has no run, or one that cannot be read."""
        return self.run.record if self.run else RunRecord(SCHEMA_VERSION, DAMAGED)


def load_trace(path: str | Path) -> Trace:
    """Read a run's folder or a trace file and find phase, kind and part of every kernel.

    Raises UsageError, in one line, for whatever is no such trace.
    """
    file = Path(path)
    file = file.parent if file.name == RUN_FILE else file
    try:
        file = file / TRACE_FILE if file.is_dir() else file
        is_result = file.name == TRACE_FILE and is_run_folder(file.parent)
    except (OSError, ValueError):
        # Reading it says what is wrong with it.
        is_result = False
    run = load_run(file.parent) if is_result else None
    events, notes = read_trace(file, follows_links=not is_result)
    host = Host(events.host, notes.module_classes)
    timeline = find_phases(events.host, host, notes.steps)
    return Trace(file, run, notes, events, host, timeline, _attributed(events, host, timeline, notes))


def match_launches(kernels: pd.DataFrame, launches: Events) -> Integers:
    """For each kernel its launch, NONE where it has none: the last call with its correlation id before it, or else the
    first with it. A call that launches a CUDA graph has many kernels."""
    calls = pd.DataFrame.from_records(launches, columns=["correlation", "start_ns"]).assign(call=range(len(launches)))
    calls = calls[calls.correlation != NONE]
    last = pd.merge_asof(kernels[["correlation", "start_ns"]], calls, on="start_ns", by="correlation").call
    first = kernels.correlation.map(calls.drop_duplicates("correlation").set_index("correlation").call)
    return np.asarray(last.fillna(first).fillna(NONE), dtype=np.int64)


def _attributed(events: TraceEvents, host: Host, timeline: PhaseTimeline, notes: TraceNotes) -> pd.DataFrame:
    """The kernels with what their launches and the host's events tell of them."""
    kernels, launches = events.kernels, events.launches
    launch = match_launches(kernels, launches)
    is_linked = launch != NONE
    of_launch = {
        "launch_ns": (launches.start_ns, kernels.start_ns), "returned_ns": (launches.end_ns, kernels.start_ns),
        "thread": (launches.thread, events.main_thread),
    }  # fmt: skip
    # Behind the launches stands a nought for the kernels without one; NONE reads it.
    columns = {
        name: np.where(is_linked, np.append(values, 0)[launch], own) for name, (values, own) in of_launch.items()
    }
    launch_ns, around = columns["launch_ns"], host.nesting.around(columns["thread"], columns["launch_ns"])
    around = np.where(is_linked, around, NONE)
    is_counted = is_linked.copy()
    if len(timeline.step_ns):
        is_counted &= (launch_ns >= timeline.step_ns[0, 0]) & (launch_ns < timeline.step_ns[:, 1].max())
    # Correlation ids rise with the calls; a kernel with a later one has lost its launch.
    first_id = min(launches.correlation[launches.correlation != NONE], default=0)
    is_counted |= ~is_linked & ~kernels.correlation.between(0, first_id - 1)
    names = [*host.names, ""]
    operators = [names[event] for event in around]
    kernels = kernels.assign(
        **columns,
        launch=launch,
        around=around,
        phase=np.where(is_linked, timeline.at(launch_ns), UNLINKED),
        kind=[*map(kind_of, kernels.name, kernels.category, operators)],
        # Of a trace whose steps launched nothing everything counts.
        is_counted=is_counted | (not is_counted.any()),
    )
    in_graph = parts_in_graphs(kernels, host, read_graphs(notes.compiled_graphs, notes.module_classes))
    parts = []
    for index, (event, phase, kind) in enumerate(zip(around.tolist(), kernels.phase, kernels.kind, strict=True)):
        # What is done for the update, for the input or between ranks is so whatever the operator.
        if kind == "comm":
            part: str | None = "comm"
        elif phase in ("clip", "optimizer", "zero_grad"):
            part = "optimizer"
        elif phase in ("data", "transfer"):
            part = "data"
        else:
            part = in_graph.get(index) or host.part(event)
            if part is None and phase == "backward" and host.is_first_gradient(event):
                part = "loss"
        # These kinds do a part of the model and nothing else.
        parts.append(part or (kind if kind in ("attention", "norm") else UNCLASSIFIED))
    return describe(kernels.assign(part=parts), host, timeline)
