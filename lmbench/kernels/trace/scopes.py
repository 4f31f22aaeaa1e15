"""What surrounds every event of the host: module, autograd node, compiled graph; and the part that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lmbench.kernels.trace.autograd import forward_of_nodes
from lmbench.kernels.trace.events import NONE, HostEvents, Integers
from lmbench.kernels.trace.nesting import parents
from lmbench.kernels.trace.operators import (
    ACCUMULATE,
    ENGINE,
    GRAPH_CALL,
    is_product,
    is_sum,
    module_path,
    operator_part,
)
from lmbench.kernels.trace.parts import part_of
from lmbench.kernels.trace.recorded import MODULE

# Ranges of phases and steps begin and end across operators, and are looked up by time alone.
_NESTED_RANGES = (MODULE, "[pl][module]")


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


class PartFinder:
    """Parts of events by their surroundings; what was found for an event is kept."""

    def __init__(self, host: HostEvents, scopes: Scopes, classes: Mapping[str, str]) -> None:
        self._host = host
        self._scopes = scopes
        self._classes = classes
        self._of_event: dict[int, str | None] = {}
        self._of_path: dict[str, str | None] = {}
        self._blocks = self._paths_of_blocks()
        self._softmax_ns = self._first_softmax()

    def part(self, event: int) -> str | None:
        """Part of the work that an event launched, None where nothing tells."""
        if event == NONE:
            return None
        if event not in self._of_event:
            # Set before: a damaged trace may go round in circles.
            self._of_event[event] = None
            self._of_event[event] = self._find(event)
        return self._of_event[event]

    def _find(self, event: int) -> str | None:
        scope = int(self._scopes.scope[event])
        if scope == NONE:
            return self._by_operator(event, NONE)
        if not self._host.names[scope].startswith(ENGINE):
            return self._in_module(event, scope)
        if self._is_gradient_sum(event, scope) and self._ends_at_residual(scope):
            return "residual"
        return self._in_backward(event, scope)

    def _in_backward(self, event: int, engine: int) -> str | None:
        """A node has its forward operator's part; a gradient is stored on behalf of the node that made it."""
        while self._host.names[engine].endswith(ACCUMULATE) and engine in self._scopes.previous:
            engine = self._scopes.previous[engine]
        return self._forward_part(engine) or self._by_node(event, engine)

    def _by_node(self, event: int, engine: int) -> str | None:
        return operator_part(self._host.names[engine][len(ENGINE) :]) or self._by_operator(event, engine)

    def _is_gradient_sum(self, event: int, engine: int) -> bool:
        """An addition in the engine's event but not in the node's own function: of two gradients of one tensor."""
        is_outside = int(self._scopes.node[event]) == NONE and not self._host.names[engine].endswith(ACCUMULATE)
        return is_outside and is_sum(self._host.names[event])

    def _ends_at_residual(self, engine: int) -> bool:
        """Whether the tensor is the residual stream's: its next node is of a residual addition or of the embedding, and
        the other gradient can have come through a residual addition behind it."""
        following = self._scopes.following.get(engine)
        if following is None or self._forward_part(following) not in ("residual", "embedding"):
            return False
        # Within one backward pass the engine goes down in sequence numbers.
        number, before = int(self._host.sequence[engine]), self._scopes.previous.get(engine)
        while before is not None and (
            int(self._host.sequence[before]) >= number or self._host.sequence[before] == NONE
        ):
            if self._forward_part(before) == "residual":
                return True
            number = max(number, int(self._host.sequence[before]))
            before = self._scopes.previous.get(before)
        return False

    def _forward_part(self, engine: int) -> str | None:
        forward = int(self._scopes.forward[engine])
        return self.part(forward) if forward != NONE else None

    def _in_module(self, event: int, scope: int) -> str | None:
        path = module_path(self._host.names[scope]) or ""
        if path not in self._of_path:
            self._of_path[path] = part_of(path, self._classes)
        part = self._of_path[path]
        if part is None:
            return self._by_operator(event, scope) or self._in_block(event, path)
        if part == "attention":
            return self._by_operator(event, scope) or self._product_in_attention(event, scope)
        return part

    def _by_operator(self, event: int, scope: int) -> str | None:
        """The innermost operator up to the scope that tells a part by its name."""
        while event not in (NONE, scope):
            if part := operator_part(self._host.names[event]):
                return part
            event = int(self._scopes.parent[event])
        return None

    def _in_block(self, event: int, path: str) -> str | None:
        """An addition directly in a module that has norms below it is a residual's."""
        return "residual" if path in self._blocks and is_sum(self._host.names[event]) else None

    def _product_in_attention(self, event: int, scope: int) -> str:
        """Products directly in an attention module: scores come before its softmax, values after."""
        softmax_ns = self._softmax_ns.get(scope)
        while softmax_ns is not None and event not in (NONE, scope):
            if is_product(self._host.names[event]):
                return "scores" if self._host.start_ns[event] < softmax_ns else "values"
            event = int(self._scopes.parent[event])
        return "attention"

    def _paths_of_blocks(self) -> set[str]:
        paths = {path for name in set(self._host.names) if (path := module_path(name))}
        norms = (path for path in paths if part_of(path, self._classes) == "norm")
        return {path.rpartition(".")[0] for path in norms if any(name.isdecimal() for name in path.split("."))}

    def _first_softmax(self) -> dict[int, int]:
        """By module range, when the first softmax directly in it began."""
        found: dict[int, int] = {}
        for index, name in enumerate(self._host.names):
            scope = int(self._scopes.scope[index])
            if scope != NONE and operator_part(name) == "softmax":
                found.setdefault(scope, int(self._host.start_ns[index]))
        return found
