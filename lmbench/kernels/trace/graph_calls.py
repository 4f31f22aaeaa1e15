"""Calls of compiled graphs in a trace: which kernels each of them ran, and the parts of these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from lmbench.kernels.trace.events import NONE, Events, HostEvents, Integers
from lmbench.kernels.trace.graphs import TRITON, CompiledGraph, parts_of_call
from lmbench.kernels.trace.replays import parts_of_replay
from lmbench.kernels.trace.scopes import Scopes


def parts_in_graphs(
    events: Events,
    host: HostEvents,
    scopes: Scopes,
    of_kernel: Integers,
    launch: Integers,
    kinds: Sequence[str],
    graphs: Sequence[CompiledGraph],
) -> dict[int, str]:
    """Parts of the kernels that calls of compiled graphs launched, by kernel; those that cannot be told are missing.

    `of_kernel` is each kernel's innermost host event, `launch` its launch, `kinds` its kind.
    """
    if not graphs:
        return {}
    calls: dict[int, list[int]] = defaultdict(list)
    for index in np.flatnonzero(of_kernel != NONE):
        if (call := int(scopes.graph[of_kernel[index]])) != NONE:
            calls[call].append(int(index))
    device, started = events.device, events.launches.start_ns
    found: dict[int, str] = {}
    for call, members in calls.items():
        # By launch, and within a launched CUDA graph by start.
        members.sort(key=lambda index: (int(started[launch[index]]), int(device.start_ns[index])))
        operators = [_child_of(call, int(of_kernel[index]), scopes) for index in members]
        names = [device.names[index] for index in members]
        found |= zip(members, _by_name(graphs, host, names, operators), strict=True)
        replayed = [index for index, operator in zip(members, operators, strict=True) if operator == NONE]
        parts = parts_of_replay(graphs, [device.names[i] for i in replayed], [kinds[i] for i in replayed])
        found |= {index: part for index, part in zip(replayed, parts, strict=True) if part}
    return {index: part for index, part in found.items() if part}


def _by_name(graphs: Sequence[CompiledGraph], host: HostEvents, names: list[str], operators: list[int]) -> list[str]:
    """Parts of one call's kernels: of Triton's by their names, of others by the operators directly in the call."""
    triton = [index for index, name in enumerate(names) if name.startswith(TRITON)]
    library = sorted({event for event in operators if event != NONE and host.names[event].startswith("aten::")})
    by_kernel, by_operator = parts_of_call(
        graphs, [names[index] for index in triton], [host.names[event].removeprefix("aten::") for event in library]
    )
    part_of_operator = dict(zip(library, by_operator, strict=True))
    parts = [part_of_operator.get(operator, "") for operator in operators]
    for index, part in zip(triton, by_kernel, strict=True):
        parts[index] = part
    for index, operator in enumerate(operators):
        # Inductor makes its own kernels of sums; this one adds up what the mixed-order reduction before it left.
        if index and operator != NONE and host.names[operator] == "aten::sum" and not parts[index]:
            parts[index] = parts[index - 1]
    return parts


def _child_of(call: int, event: int, scopes: Scopes) -> int:
    """The event directly in the call that an event lies in."""
    while event != NONE and int(scopes.parent[event]) != call:
        event = int(scopes.parent[event])
    return event
