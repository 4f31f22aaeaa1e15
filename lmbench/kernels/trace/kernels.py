"""Every kernel of a trace with its phase, kind and part of the model: the table that all else is computed from."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from lmbench.kernels.trace.events import NONE, Events, HostEvents, Integers
from lmbench.kernels.trace.graph_calls import parts_in_graphs
from lmbench.kernels.trace.graphs import CompiledGraph
from lmbench.kernels.trace.kinds import UNCLASSIFIED, kind_of
from lmbench.kernels.trace.nesting import innermost
from lmbench.kernels.trace.phases import OUTSIDE, PhaseTimeline
from lmbench.kernels.trace.scopes import PartFinder, Scopes

_UPDATE_PHASES = ("clip", "optimizer", "zero_grad")
_INPUT_PHASES = ("data", "transfer")


@dataclass(frozen=True)
class KernelTable:
    """One row for each kernel, copy and fill, by start; times in ns.

    `launch` is an index into the launches, NONE where there is none.
    """

    names: list[str]
    start_ns: Integers
    end_ns: Integers
    stream: Integers
    launch: Integers
    phases: list[str]
    kinds: list[str]
    parts: list[str]

    @property
    def duration_ns(self) -> Integers:
        return self.end_ns - self.start_ns


def match_launches(events: Events) -> Integers:
    """For each device event its launch by the correlation id: the last call with that id before it, NONE if none has.

    A call that launches a CUDA graph has many kernels.
    """
    device, launches = events.device, events.launches
    by_id: dict[int, list[int]] = defaultdict(list)
    for index, number in enumerate(launches.correlation.tolist()):
        if number != NONE:
            by_id[number].append(index)
    found = np.full(len(device.names), NONE, dtype=np.int64)
    for index, number in enumerate(device.correlation.tolist()):
        calls = by_id.get(number, [])
        if len(calls) == 1:
            found[index] = calls[0]
        elif calls:
            before = [call for call in calls if launches.start_ns[call] <= device.start_ns[index]]
            found[index] = before[-1] if before else calls[0]
    return found


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
    operator = _operators(events, host, scopes)
    of_kernel = np.where(is_launched, operator[launch], NONE) if len(operator) else np.full(len(launch), NONE)
    kinds = _kinds(events, host, of_kernel)
    in_graph = parts_in_graphs(events, host, scopes, of_kernel, launch, kinds, graphs)
    phases, parts = [], []
    for index, kind in enumerate(kinds):
        event = int(of_kernel[index])
        phase = timeline.phases[piece[index]] if piece[index] != NONE else OUTSIDE
        is_main = launch[index] != NONE and launches.thread[launch[index]] == events.main_thread
        part = in_graph.get(index) or finder.part(event)
        phases.append(phase)
        parts.append(_in_phase(part, phase, kind, is_main))
    return KernelTable(
        names=device.names,
        start_ns=device.start_ns,
        end_ns=device.end_ns,
        stream=device.stream,
        launch=launch,
        phases=phases,
        kinds=kinds,
        parts=parts,
    )


def _operators(events: Events, host: HostEvents, scopes: Scopes) -> Integers:
    """The innermost operator or module range around each launch."""
    launches = events.launches
    columns = (host.thread, host.start_ns, host.end_ns, scopes.parent)
    return innermost(*columns, launches.thread, launches.start_ns)


def _kinds(events: Events, host: HostEvents, of_kernel: Integers) -> list[str]:
    """Kind of each kernel by its name, or by the operator around its launch."""
    known: dict[tuple[str, str, str], str] = {}
    kinds = []
    for name, category, event in zip(events.device.names, events.device.category, of_kernel.tolist(), strict=True):
        key = (name, category, host.names[event] if event != NONE else "")
        kinds.append(known.get(key) or known.setdefault(key, kind_of(*key)))
    return kinds


def _in_phase(part: str | None, phase: str, kind: str, is_main: bool) -> str:
    """What is done for the update, for the input or between ranks is so whatever the operator; the rest by its part."""
    if kind == "comm":
        return "comm"
    if phase in _UPDATE_PHASES:
        return "optimizer"
    if phase in _INPUT_PHASES:
        return "data"
    if part is None and phase == "backward" and is_main:
        # `loss.backward()` itself makes the first gradient, on the thread that called it.
        return "loss"
    return part or UNCLASSIFIED
