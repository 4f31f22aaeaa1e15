"""A trace, read and attributed: every kernel with its phase, kind and part, from which all else is computed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmbench.kernels.trace.compiled import CompiledGraph, parts_in_graphs, read_graphs
from lmbench.kernels.trace.document import TraceDocument, find_trace
from lmbench.kernels.trace.events import NONE, Events, Flags, HostEvents, Integers, read_events
from lmbench.kernels.trace.kinds import UNCLASSIFIED, kind_of
from lmbench.kernels.trace.parts import PartFinder
from lmbench.kernels.trace.phases import OUTSIDE, UNLINKED, PhaseTimeline, TracePhase, find_phases
from lmbench.kernels.trace.scopes import Scopes, find_scopes, innermost, nested_only
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.vocabulary import DAMAGED

_UPDATE_PHASES = ("clip", "optimizer", "zero_grad")
_INPUT_PHASES = ("data", "transfer")
# Kinds whose kernels do a part of the model and nothing else, where no module or operator tells it.
_PARTS_THEMSELVES = ("attention", "norm")


@dataclass(frozen=True)
class KernelTable:
    """One row for each kernel, copy and fill, by start; times in ns.

    `launch` is an index into the launches, NONE where the trace has none: when the host started that kernel, and in
    which phase, is then unknown, and its phase is `unlinked`. `device` tells apart the devices of a trace that has
    several.
    """

    names: list[str]
    start_ns: Integers
    end_ns: Integers
    stream: Integers
    device: Integers
    launch: Integers
    phases: list[TracePhase]
    kinds: list[str]
    parts: list[str]

    @property
    def duration_ns(self) -> Integers:
        return self.end_ns - self.start_ns

    @property
    def is_linked(self) -> Flags:
        """Which kernels have a launch."""
        linked: Flags = self.launch != NONE
        return linked


def match_launches(events: Events) -> Integers:
    """For each device event its launch, NONE where it has none: the last call with its correlation id before it.

    A call that launches a CUDA graph has many kernels. Where the correlation ids of a trace link nothing, as with some
    versions of ROCm, the number of the operator around the call does (`External id`): its calls and its kernels go
    together in their order.
    """
    device, launches = events.device, events.launches
    found = _last_before(launches.correlation, launches.start_ns, device.correlation, device.start_ns)
    if (found != NONE).any():
        return found
    calls = _places(launches.external)
    for number, indices in _places(device.external).items():
        of_number = calls.get(number, [])
        # Of more kernels than calls the last are those of the last call.
        for index, call in zip(indices, of_number + of_number[-1:] * len(indices), strict=False):
            found[index] = call
    return found


def _last_before(call_id: Integers, call_ns: Integers, kernel_id: Integers, kernel_ns: Integers) -> Integers:
    """For each kernel the last call with its id that began before it, or else the first with that id."""
    known = np.flatnonzero(call_id != NONE)
    # Calls stand by their starts, and so do those of one id.
    order = known[np.argsort(call_id[known], kind="stable")]
    ids = call_id[order]
    first, past = np.searchsorted(ids, kernel_id), np.searchsorted(ids, kernel_id, side="right")
    found = np.full(len(kernel_id), NONE, dtype=np.int64)
    single = past - first == 1
    found[single] = order[first[single]]
    for index in np.flatnonzero(past - first > 1):
        calls = order[first[index] : past[index]]
        before = np.searchsorted(call_ns[calls], kernel_ns[index], side="right")
        found[index] = calls[max(before - 1, 0)]
    return found


def _places(numbers: Integers) -> dict[int, list[int]]:
    """Where each number stands, but for NONE."""
    places: dict[int, list[int]] = defaultdict(list)
    for index, number in enumerate(numbers.tolist()):
        if number != NONE:
            places[number].append(index)
    return places


def attribute(
    events: Events,
    host: HostEvents,
    timeline: PhaseTimeline,
    scopes: Scopes,
    finder: PartFinder,
    graphs: list[CompiledGraph],
) -> KernelTable:
    """Put kernels, launches and the host's events together; `host` are the nested events that `scopes` belongs to."""
    device, launches = events.device, events.launches
    launch = match_launches(events)
    is_launched = launch != NONE
    # Index NONE reads the last launch; those rows are overwritten below.
    moments = launches.start_ns[launch] if len(launches.names) else np.zeros(len(launch), dtype=np.int64)
    piece = np.where(is_launched, timeline.at(moments), NONE)
    # The innermost operator or module range around each launch.
    nested = (host.thread, host.start_ns, host.end_ns, scopes.parent)
    operator = innermost(*nested, launches.thread, launches.start_ns)
    of_kernel = np.where(is_launched, operator[launch], NONE) if len(operator) else np.full(len(launch), NONE)
    kinds = _kinds(events, host, of_kernel)
    in_graph = parts_in_graphs(events, host, scopes, of_kernel, launch, kinds, graphs)
    phases: list[TracePhase] = []
    parts = []
    for index, kind in enumerate(kinds):
        event = int(of_kernel[index])
        phase: TracePhase = OUTSIDE if is_launched[index] else UNLINKED
        if piece[index] != NONE:
            phase = timeline.phases[piece[index]]
        part = in_graph.get(index) or finder.part(event)
        if part is None and phase == "backward" and finder.is_first_gradient(event):
            part = "loss"
        phases.append(phase)
        parts.append(_in_phase(part, phase, kind))
    return KernelTable(
        device.names, device.start_ns, device.end_ns, device.stream, device.device, launch,
        phases=phases, kinds=kinds, parts=parts,
    )  # fmt: skip


def _kinds(events: Events, host: HostEvents, of_kernel: Integers) -> list[str]:
    """Kind of each kernel by its name, or by the operator around its launch."""
    known: dict[tuple[str, str, str], str] = {}
    kinds = []
    for name, category, event in zip(events.device.names, events.device.category, of_kernel.tolist(), strict=True):
        key = (name, category, host.names[event] if event != NONE else "")
        kinds.append(known.get(key) or known.setdefault(key, kind_of(*key)))
    return kinds


def _in_phase(part: str | None, phase: str, kind: str) -> str:
    """What is done for the update, for the input or between ranks is so whatever the operator; the rest by its part."""
    if kind == "comm":
        return "comm"
    if phase in _UPDATE_PHASES:
        return "optimizer"
    if phase in _INPUT_PHASES:
        return "data"
    if part is None and kind in _PARTS_THEMSELVES:
        return kind
    return part or UNCLASSIFIED


@dataclass(frozen=True)
class Trace:
    """All that is known of a trace. `host` are the events that nest (operators, modules); `scopes` belongs to them."""

    source: TraceDocument
    events: Events
    host: HostEvents
    scopes: Scopes
    finder: PartFinder
    timeline: PhaseTimeline
    kernels: KernelTable

    @property
    def run(self) -> RunRecord:
        """The run's record; every field None where the trace has no run, or one that cannot be read."""
        return self.source.run.record if self.source.run else RunRecord(SCHEMA_VERSION, DAMAGED)


def load_trace(path: str | Path) -> Trace:
    """Read a run's folder or a trace file and find phase, kind and part of every kernel.

    Raises UsageError, in one line, for whatever is no such trace.
    """
    source = find_trace(path)
    events = read_events(source)
    timeline = find_phases(events, source.notes.steps)
    host = nested_only(events.host)
    scopes = find_scopes(host)
    classes = source.notes.module_classes
    finder = PartFinder(host, scopes, classes)
    graphs = read_graphs(source.notes.compiled_graphs, classes)
    kernels = attribute(events, host, timeline, scopes, finder, graphs)
    return Trace(source, events, host, scopes, finder, timeline, kernels)
