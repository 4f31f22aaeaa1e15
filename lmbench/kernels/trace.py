"""A trace, read and attributed: every kernel with its launch, phase, kind and part, from which all else is computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from lmbench.kernels.compiled import parts_in_graphs, read_graphs
from lmbench.kernels.events import CATEGORIES, Events, TraceEvents, find_trace, read_trace
from lmbench.kernels.host import Host
from lmbench.kernels.kinds import kind_of
from lmbench.kernels.parts import UNCLASSIFIED
from lmbench.kernels.phases import UNLINKED, PhaseTimeline, TracePhase, find_phases
from lmbench.kernels.recorded import TraceNotes
from lmbench.records.intervals import NONE, Flags, Integers
from lmbench.records.load import Run
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.vocabulary import DAMAGED


@dataclass(frozen=True)
class KernelTable:
    """One row for each kernel, copy and fill, by start.

    `launch` is an index into the launches, NONE where the trace has none: when the host started that kernel, and in
    which phase, is then unknown, and its phase is `unlinked`.
    """

    events: Events
    launch: Integers
    phases: list[TracePhase]
    kinds: list[str]
    parts: list[str]

    def __len__(self) -> int:
        return len(self.events)

    @property
    def duration_ns(self) -> Integers:
        return self.events.end_ns - self.events.start_ns

    @property
    def is_linked(self) -> Flags:
        """Which kernels have a launch."""
        return np.asarray(self.launch != NONE)


@dataclass(frozen=True)
class Trace:
    """All that is known of a trace; `run` is None for a bare trace file."""

    path: Path
    run: Run | None
    notes: TraceNotes
    events: TraceEvents
    host: Host
    timeline: PhaseTimeline
    kernels: KernelTable

    @property
    def record(self) -> RunRecord:
        """The run's record; every field None where the trace has no run, or one that cannot be read."""
        return self.run.record if self.run else RunRecord(SCHEMA_VERSION, DAMAGED)


def load_trace(path: str | Path) -> Trace:
    """Read a run's folder or a trace file and find phase, kind and part of every kernel.

    Raises UsageError, in one line, for whatever is no such trace.
    """
    file, run = find_trace(path)
    events, notes = read_trace(file, is_result=run is not None)
    host = Host(events.host, notes.module_classes)
    timeline = find_phases(events.host, host, notes.steps)
    return Trace(file, run, notes, events, host, timeline, _attribute(events, host, timeline, notes))


def match_launches(kernels: Events, launches: Events) -> Integers:
    """For each kernel its launch, NONE where it has none: the last call with its correlation id before it.

    A call that launches a CUDA graph has many kernels. Where the correlation ids of a trace link nothing, as with some
    versions of ROCm, the number of the operator around the call does (`External id`): its calls and its kernels go
    together in their order, and of more kernels than calls the last are those of the last call.
    """
    launch = _last(launches.correlation, launches.start_ns, kernels.correlation, kernels.start_ns)
    if (launch != NONE).any():
        return launch
    return _last(launches.external, _occurrence(launches.external), kernels.external, _occurrence(kernels.external))


def _last(call_id: Integers, call_at: Integers, kernel_id: Integers, kernel_at: Integers) -> Integers:
    """For each kernel the last call of its id up to its moment, or else the first of its id; NONE without one."""
    # Ids and moments by their ranks, so that both fit into one number to search for.
    ids, moments = (
        np.unique(np.concatenate(both), return_inverse=True)[1].astype(np.int64)
        for both in ((call_id, kernel_id), (call_at, kernel_at))
    )
    key = ids * (len(ids) + 1) + moments
    order = np.argsort(key[: len(call_id)], kind="stable")
    place = np.searchsorted(key[order], key[len(call_id) :], side="right") - 1
    last = np.full(len(kernel_id), NONE, dtype=np.int64)
    for candidate in (place + 1, place):
        call = np.append(order, NONE)[np.clip(candidate, NONE, len(order))]
        fits = (call != NONE) & (kernel_id != NONE) & (np.append(call_id, NONE)[call] == kernel_id)
        last[fits] = call[fits]
    return last


def _occurrence(numbers: Integers) -> Integers:
    """How many equal numbers stand before each."""
    order = np.argsort(numbers, kind="stable")
    rank = np.empty_like(numbers)
    rank[order] = np.arange(len(numbers)) - np.searchsorted(numbers[order], numbers[order])
    return rank


def _attribute(events: TraceEvents, host: Host, timeline: PhaseTimeline, notes: TraceNotes) -> KernelTable:
    """Put kernels, launches and the host's events together."""
    kernels, launches = events.kernels, events.launches
    launch = match_launches(kernels, launches)
    # Behind the launches stands what a kernel without a launch has; NONE reads the last.
    at_launch = [*timeline.at(launches.start_ns), UNLINKED]
    phases: list[TracePhase] = [at_launch[index] for index in launch]
    # The innermost operator or module range around each launch.
    around = np.append(host.nesting.around(launches.thread, launches.start_ns), NONE)[launch]
    operators = [host.names[event] if event != NONE else "" for event in around]
    categories = [CATEGORIES[code] for code in kernels.category]
    kinds = list(map(lru_cache(None)(kind_of), kernels.names, categories, operators))
    graphs = read_graphs(notes.compiled_graphs, notes.module_classes)
    in_graph = parts_in_graphs(kernels, np.append(launches.start_ns, NONE)[launch], kinds, around, host, graphs)
    parts = []
    for index, (event, phase, kind) in enumerate(zip(around.tolist(), phases, kinds, strict=True)):
        part = in_graph.get(index) or host.part(event)
        if part is None and phase == "backward" and host.is_first_gradient(event):
            part = "loss"
        parts.append(_in_phase(part, phase, kind))
    return KernelTable(kernels, launch, phases, kinds, parts)


def _in_phase(part: str | None, phase: str, kind: str) -> str:
    """What is done for the update, for the input or between ranks is so whatever the operator; the rest by its part."""
    if kind == "comm":
        return "comm"
    if phase in ("clip", "optimizer", "zero_grad"):
        return "optimizer"
    if phase in ("data", "transfer"):
        return "data"
    # These kinds do a part of the model and nothing else.
    return part or (kind if kind in ("attention", "norm") else UNCLASSIFIED)
