"""What surrounds every event of the host: events around it, its module, autograd node and compiled graph.

All by time stamps, and by the numbers that autograd gives its nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lmbench.kernels.trace.events import NONE, HostEvents, Integers
from lmbench.records.vocabulary import MODULE

#: Beginnings of names: an autograd node's event of the engine, a call of a compiled graph.
ENGINE = "autograd::engine::evaluate_function: "
GRAPH_CALL = "## Call CompiledFxGraph "
#: The end of the name of a node that stores a gradient.
ACCUMULATE = "torch::autograd::AccumulateGrad"
# Ranges of phases and steps begin and end across operators, and are looked up by time alone.
_NESTED_RANGES = (MODULE, "[pl][module]")


def parents(thread: Integers, start_ns: Integers, end_ns: Integers) -> Integers:
    """Index of the innermost event around each event, NONE at the top.

    Events stand by thread, then start, then the longer first. One that begins inside another and ends after it is that
    one's child all the same.
    """
    found: list[int] = []
    open_events: list[int] = []
    current = None
    starts, ends = start_ns.tolist(), end_ns.tolist()
    for index, own_thread in enumerate(thread.tolist()):
        if own_thread != current:
            current = own_thread
            open_events = []
        start = starts[index]
        while open_events and ends[open_events[-1]] <= start:
            open_events.pop()
        found.append(open_events[-1] if open_events else NONE)
        open_events.append(index)
    return np.array(found, dtype=np.int64)


def innermost(
    thread: Integers, start_ns: Integers, end_ns: Integers, parent: Integers, of_thread: Integers, at_ns: Integers
) -> Integers:
    """Index of the innermost event around each moment on its thread (pairs of `of_thread`, `at_ns`), NONE if none."""
    found = np.full(len(at_ns), NONE, dtype=np.int64)
    for own in np.unique(of_thread) if len(thread) else ():
        first, last = np.searchsorted(thread, [own, own + 1])
        of_own = np.flatnonzero(of_thread == own)
        moments = at_ns[of_own]
        last_begun = first + np.searchsorted(start_ns[first:last], moments, side="right") - 1
        found[of_own] = _climb(np.where(last_begun < first, NONE, last_begun), moments, end_ns, parent)
    return found


def _climb(index: Integers, moments: Integers, end_ns: Integers, parent: Integers) -> Integers:
    """From the event that began last, outwards to one that has not ended."""
    while True:
        is_over = (index != NONE) & (end_ns[index] <= moments)
        if not is_over.any():
            return index
        index = np.where(is_over, parent[index], index)


def flatten(start_ns: Sequence[int], end_ns: Sequence[int]) -> tuple[Integers, Integers, Integers]:
    """Nested ranges as pieces beside each other: starts, ends, and the range that each piece belongs to.

    Where ranges overlap, the one that began last has the time (of two that began together, the shorter).
    """
    order = sorted(range(len(start_ns)), key=lambda index: (start_ns[index], -end_ns[index]))
    borders = sorted({*start_ns, *end_ns})
    pieces: list[tuple[int, int, int]] = []
    waiting = iter(order)
    coming = next(waiting, None)
    open_ranges: list[int] = []
    for left, right in pairwise(borders):
        while coming is not None and start_ns[coming] <= left:
            open_ranges.append(coming)
            coming = next(waiting, None)
        while open_ranges and end_ns[open_ranges[-1]] <= left:
            open_ranges.pop()
        if open_ranges:
            pieces.append((left, right, open_ranges[-1]))
    columns = np.array(pieces, dtype=np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def forward_of_nodes(host: HostEvents) -> Integers:
    """For each event of the engine (`autograd::engine::evaluate_function: ...`) the index of the forward operator that
    made its node, NONE for all other events and where it cannot be told.

    PyTorch numbers the nodes that a thread makes; an operator carries the number that the thread's next node will have,
    so that the last operator to begin with a number is the one that made the node (an operator that needs no gradient
    makes none, and the next one carries the same number). A node's event carries its number, and under `Fwd thread id`
    one for the thread, which stands nowhere else in the trace: the thread is the one that has most of these numbers.
    """
    found = np.full(len(host.names), NONE, dtype=np.int64)
    creators: dict[int, dict[int, int]] = defaultdict(dict)
    # Events of a thread stand in the order of their starts: the last that began with a number replaces earlier ones.
    for index in np.flatnonzero((host.sequence != NONE) & (host.forward_thread <= 0)):
        creators[int(host.thread[index])][int(host.sequence[index])] = int(index)
    nodes: dict[int, list[int]] = defaultdict(list)
    for index in np.flatnonzero((host.sequence != NONE) & (host.forward_thread > 0)):
        if host.names[index].startswith(ENGINE):
            nodes[int(host.forward_thread[index])].append(int(index))
    for indices in nodes.values():
        numbers = set(host.sequence[indices].tolist())
        made = max(creators.values(), key=lambda of_thread: len(numbers & of_thread.keys()), default={})
        for node in indices:
            creator = made.get(int(host.sequence[node]), NONE)
            # A number of a node that was made before the trace began can come again on another thread.
            if creator != NONE and host.start_ns[creator] <= host.start_ns[node]:
                found[node] = creator
    return found


@dataclass(frozen=True)
class Scopes:
    """Columns beside the host's events, each an index of an event or NONE.

    `scope`: the innermost module range or engine event around (or at) an event. `graph`: the call of a compiled graph.
    `forward`: of an engine event, the forward operator. `node`: the backward function inside an engine event.
    `previous`: of an engine event, the one before it on its thread; `following`: the next that stores no gradient.
    """

    parent: Integers
    scope: Integers
    graph: Integers
    forward: Integers
    node: Integers
    previous: dict[int, int]
    following: dict[int, int]


def nested_only(host: HostEvents) -> HostEvents:
    """The host's events without the ranges that do not nest."""
    keep = np.array(
        [
            not is_range or name.startswith(_NESTED_RANGES)
            for name, is_range in zip(host.names, host.is_range, strict=True)
        ],
        dtype=np.bool_,
    )
    return HostEvents(
        [host.names[index] for index in np.flatnonzero(keep)],
        host.is_range[keep],
        host.start_ns[keep],
        host.end_ns[keep],
        host.thread[keep],
        host.sequence[keep],
        host.forward_thread[keep],
    )


def find_scopes(host: HostEvents) -> Scopes:
    """Look at every event once, parents before children."""
    parent = parents(host.thread, host.start_ns, host.end_ns)
    count = len(host.names)
    scope, graph, node = [NONE] * count, [NONE] * count, [NONE] * count
    previous: dict[int, int] = {}
    following: dict[int, int] = {}
    last_engine: dict[int, int] = {}
    last_node: dict[int, int] = {}
    threads = host.thread.tolist()
    for index, (name, above) in enumerate(zip(host.names, parent.tolist(), strict=True)):
        if above != NONE:
            scope[index], graph[index], node[index] = scope[above], graph[above], node[above]
        if name.startswith(ENGINE):
            scope[index], node[index] = index, NONE
            before = last_engine.get(threads[index])
            if before is not None:
                previous[index] = before
            last_engine[threads[index]] = index
            if not name.endswith(ACCUMULATE):
                if (node_before := last_node.get(threads[index])) is not None:
                    following[node_before] = index
                last_node[threads[index]] = index
        elif name.startswith(_NESTED_RANGES):
            scope[index], node[index] = index, NONE
        elif name.startswith(GRAPH_CALL):
            graph[index] = index
        elif above != NONE and scope[above] == above and host.names[above] == ENGINE + name:
            node[index] = index
    columns = [np.array(column, dtype=np.int64) for column in (scope, graph, node)]
    return Scopes(parent, columns[0], columns[1], forward_of_nodes(host), columns[2], previous, following)
