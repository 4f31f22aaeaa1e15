"""Operators of a trace without kernels: the host's time in each, without that of the operators inside it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from lmbench.kernels.trace.analysis import Trace
from lmbench.kernels.trace.events import NONE, Integers
from lmbench.kernels.trace.operators import ENGINE
from lmbench.kernels.trace.phases import OUTSIDE, PHASE_ORDER

# The engine's own work around each node; the node's function is an event of its own.
_ENGINE_NAME = "autograd engine"


@dataclass(frozen=True)
class OperatorRow:
    """One operator's calls within a phase; `share_fraction` is of the phase's time in operators."""

    phase: str
    name: str
    self_s: float
    share_fraction: float
    calls: int
    mean_s: float


def operator_times(trace: Trace) -> dict[str, list[OperatorRow]]:
    """By phase, in the order of a step: its operators, the longest first."""
    host = trace.host
    own_ns = _self_times(trace)
    piece = trace.timeline.at(host.start_ns)
    sums: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index in np.flatnonzero(~host.is_range):
        phase = trace.timeline.phases[piece[index]] if piece[index] != NONE else OUTSIDE
        sums[phase][_ENGINE_NAME if host.names[index].startswith(ENGINE) else host.names[index]].append(
            int(own_ns[index])
        )
    return {phase: _rows(phase, sums[phase]) for phase in PHASE_ORDER if phase in sums}


def _rows(phase: str, times: dict[str, list[int]]) -> list[OperatorRow]:
    total = sum(sum(of_name) for of_name in times.values()) or 1
    rows = [
        OperatorRow(phase, name, own / 1e9, own / total, len(of_name), own / len(of_name) / 1e9)
        for name, of_name in times.items()
        for own in [sum(of_name)]
    ]
    return sorted(rows, key=lambda row: (-row.self_s, row.name))


def _self_times(trace: Trace) -> Integers:
    """Each event's time without the operators directly inside; ranges of modules take none away."""
    host = trace.host
    duration = host.end_ns - host.start_ns
    own = duration.copy()
    around: list[int] = []
    is_range = host.is_range.tolist()
    for index, parent in enumerate(trace.scopes.parent.tolist()):
        # Parents come first: what is around a range is around what lies in it.
        holder = around[parent] if parent != NONE and is_range[parent] else parent
        around.append(holder)
        if holder != NONE and not is_range[index]:
            own[holder] -= min(int(duration[index]), int(host.end_ns[holder] - host.start_ns[index]))
    positive: Integers = np.maximum(own, 0)
    return positive
