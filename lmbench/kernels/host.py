"""The part of the model that each event of the host works for.

The events around it tell the part; for a backward node, the forward operator that made the node. Time stamps say which
events lie around, and autograd's sequence numbers say which operator made a node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise, takewhile
from typing import Any

import numpy as np

from lmbench.code_owners import is_users_function
from lmbench.errors import UsageError
from lmbench.kernels.events import MODULE_CALL, Events, is_range, starting, users_ranges, where
from lmbench.kernels.names import module_path, operator_part, part_of
from lmbench.records.intervals import NONE, Flags, Integers
from lmbench.records.vocabulary import MODULE

#: The prefix of events in which autograd's engine runs a node.
ENGINE = "autograd::engine::evaluate_function: "
#: The suffix of nodes that store a gradient.
ACCUMULATE = "torch::autograd::AccumulateGrad"
_MODULES = (MODULE, "[pl][module]", MODULE_CALL)
# Operators that attention uses for the products of scores and values.
_PRODUCT = re.compile(r"^aten::(matmul|bmm|baddbmm|einsum)$")
# An addition right in a block, outside of its submodules, is the residual's.
_SUM = re.compile(r"^aten::(add|add_)$")


#: The most levels of events that are read: Python allows as many nested calls, and PyTorch's operators have some ten.
#: Each event is looked up through the levels around it.
_MAX_LEVELS = 1000


class Nesting:
    """The nesting of host events, which are ordered by thread, then start, then the longer first.

    `parent` has the index of the innermost event around each event, NONE at the top. An event that begins inside
    another and ends after it counts as its child, too.

    Raises:
        UsageError: events are nested deeper than in any real trace.
    """

    def __init__(self, events: Events) -> None:
        self.names: list[str] = events.name.tolist()
        self._thread, self._start_ns, self._end_ns = events[["thread", "start_ns", "end_ns"]].to_numpy().T
        parent = []
        opened: list[int] = []
        ends, threads = self._end_ns.tolist(), self._thread.tolist()
        for index, start in enumerate(self._start_ns.tolist()):
            while opened and (ends[opened[-1]] <= start or threads[opened[-1]] != threads[index]):
                opened.pop()
            parent.append(opened[-1] if opened else NONE)
            opened.append(index)
            if len(opened) > _MAX_LEVELS:
                raise UsageError(f"the trace is damaged: its events are nested more than {_MAX_LEVELS:,} levels deep")
        self.parent = np.array(parent, dtype=np.int64)

    def around(self, thread: Any, moments: Any) -> Integers:
        """The index of the innermost event around each moment on its thread, or on one; NONE where there is none."""
        thread, moments = np.broadcast_arrays(thread, moments)
        innermost = np.full(len(moments), NONE, dtype=np.int64)
        for number in np.unique(thread) if self.names else ():
            first, past = np.searchsorted(self._thread, [number, number + 1])
            rows = np.flatnonzero(thread == number)
            index = first + np.searchsorted(self._start_ns[first:past], moments[rows], side="right") - 1
            index = np.where(index < first, NONE, index)
            # Go outwards from the event that began last to one that has not ended.
            while (is_over := (index != NONE) & (self._end_ns[index] <= moments[rows])).any():
                index = np.where(is_over, self.parent[index], index)
            innermost[rows] = index
        return innermost

    def climb(self, event: int) -> Iterator[int]:
        """The event, then all events around it from the innermost to the outermost."""
        while event != NONE:
            yield event
            event = int(self.parent[event])

    def innermost(self, is_member: Flags) -> Integers:
        """The index of the innermost member around each event, or of the event itself; NONE where there is none.

        There is one value more than events: NONE, an index of -1, reads it as the value of no event.
        """
        return settled(np.append(np.where(is_member, np.arange(len(is_member)), self.parent), NONE))


def settled(links: Integers) -> Integers:
    """For each index the end of its chain of links: the index that links to itself."""
    while (links != links[links]).any():
        links = links[links]
    return links


class HostEvents:
    """Operators and module ranges of the host, and the part of the model that each works for.

    Ranges of phases, steps and the user's own are left out of `events`, since they may begin and end across these.
    `is_module` flags module ranges, `is_engine` events of autograd's engine around a node of the backward pass.
    `forward` has the forward operator that made the node, by engine event. `is_model` flags the outermost module ranges
    outside of the engine. `users` are the user's own ranges, `functions` the Python functions in the user's own files.
    A trace without module ranges tells parts only by operators.

    Args:
        host: all events of the host.
        functions: calls of Python functions.
        classes: class name by module path, for modules whose own name tells no part.
    """

    def __init__(self, host: Events, functions: Events, classes: Mapping[str, str]) -> None:
        events = host[~is_range(host) | starting(host.name, _MODULES)].reset_index(drop=True)
        self.events = events
        self.nesting = Nesting(events)
        self.users = Nesting(users_ranges(host))
        self.functions = Nesting(functions[where(functions.name, is_users_function)])
        self._start_ns, self._sequence = events.start_ns.tolist(), events.sequence.tolist()
        names = self.names = self.nesting.names
        self.is_engine = starting(names, ENGINE)
        self.forward = _forward_operators(events, self.is_engine)
        # The scope of an event is the innermost module range or engine event around it, or the event itself.
        self.is_module = is_range(events)
        scope = self.nesting.innermost(self.is_engine | self.is_module)
        self.is_model = self.is_module & (scope[self.nesting.parent] == NONE)
        # Both end with the value of no event, which the index NONE reads.
        self._scope, self._is_engine = scope.tolist(), [*self.is_engine.tolist(), False]
        # The start of the first softmax in each scope.
        is_softmax = events.name.map(operator_part) == "softmax"
        self._softmax_ns = events.start_ns[is_softmax].groupby(scope[:-1][is_softmax]).min().to_dict()
        # The node that the engine ran before each node on its thread, and the next one that stores no gradient.
        is_storing = events.name.str.endswith(ACCUMULATE)
        self._previous = {later: event for event, later in _pairs(events, self.is_engine)}
        self._following = dict(_pairs(events, self.is_engine & ~is_storing))
        paths = {path for name in set(names) if (path := module_path(name)) is not None}
        self._part_of_path = {path: part_of(path, classes) for path in paths}
        # A block is an indexed module, such as `blocks.3`, with a norm directly in it.
        norms = (path.split(".") for path, part in self._part_of_path.items() if part == "norm")
        self._blocks = {".".join(path[:-1]) for path in norms if any(map(str.isdecimal, path))}
        self._parts: dict[int, str | None] = {NONE: None}

    def part(self, event: int) -> str | None:
        """The part that an event works for; None where nothing tells it, and for the event NONE."""
        if event not in self._parts:
            # A damaged trace may lead back to this event: then the recursion ends here.
            self._parts[event] = None
            scope = self._scope[event]
            # The event and those around it within its scope; the innermost whose name tells a part decides.
            inside = [*takewhile(lambda index: index != scope, self.nesting.climb(event))]
            by_operator = next(filter(None, (operator_part(self.names[index]) for index in inside)), None)
            if self._is_engine[scope]:
                self._parts[event] = self._of_node(scope, inside) or by_operator
            else:
                self._parts[event] = self._of_module(scope, inside, by_operator)
        return self._parts[event]

    def module(self, event: int) -> str:
        """The path of the module that an event works for, by the ranges around it or around its forward operator."""
        scope = self._scope[event]
        if self._is_engine[scope]:
            scope = self._scope[self.forward.get(scope, NONE)]
        return (module_path(self.names[scope]) or "") if scope != NONE else ""

    def _of_module(self, scope: int, inside: list[int], by_operator: str | None) -> str | None:
        """The part of an event in a module range, by the module and those around it, or by the event's operator."""
        # All ranges around are looked at, since a range may be named by its module's class alone.
        paths = [module_path(self.names[index]) or "" for index in self.nesting.climb(scope)]
        path = paths[0] if paths else ""
        part = next(filter(None, map(self._part_of_path.get, paths)), None)
        if part in (None, "attention") and by_operator:
            return by_operator
        if part is None and path in self._blocks and inside and _SUM.match(self.names[inside[0]]):
            return "residual"
        if part == "attention" and scope in self._softmax_ns:
            # An attention module computes scores before its softmax, and values after it.
            product = next((index for index in inside if _PRODUCT.match(self.names[index])), None)
            if product is not None:
                return "scores" if self._start_ns[product] < self._softmax_ns[scope] else "values"
        return part

    def _of_node(self, engine: int, inside: list[int]) -> str | None:
        """The part of an event under a node: that of the node's forward operator.

        A node that stores a gradient has the part of the node that computed the gradient, which ran before it.
        """
        node = self.names[engine]
        is_sum = bool(inside and _SUM.match(self.names[inside[0]])) and not node.endswith(ACCUMULATE)
        # A sum outside of the node's own function adds up two gradients of one tensor.
        if is_sum and ENGINE + self.names[inside[-1]] != node and self._ends_at_residual(engine):
            return "residual"
        while self.names[engine].endswith(ACCUMULATE) and engine in self._previous:
            engine = self._previous[engine]
        return self._forward_part(engine) or operator_part(self.names[engine].removeprefix(ENGINE))

    def _ends_at_residual(self, engine: int) -> bool:
        """Whether the tensor whose two gradients a node sums is the residual stream.

        Its next node then belongs to a residual addition or to the embedding. The other gradient can have come through
        a residual addition that ran in the forward after this node's operator.
        """
        if self._forward_part(self._following.get(engine, NONE)) not in ("residual", "embedding"):
            return False
        # Within one backward pass the engine's sequence numbers fall.
        number, before = self._sequence[engine], self._previous.get(engine)
        while before is not None and (self._sequence[before] >= number or self._sequence[before] == NONE):
            if self._forward_part(before) == "residual":
                return True
            number = max(number, self._sequence[before])
            before = self._previous.get(before)
        return False

    def _forward_part(self, engine: int) -> str | None:
        return self.part(self.forward.get(engine, NONE))


def _pairs(events: Events, rows: Flags) -> list[tuple[int, int]]:
    """Pairs of flagged events that follow each other on the same thread."""
    thread = events.thread.tolist()
    return [(a, b) for a, b in pairwise(np.flatnonzero(rows).tolist()) if thread[a] == thread[b]]


def _forward_operators(events: Events, is_engine: Flags) -> dict[int, int]:
    """For each engine event the forward operator that made its node, where that is known.

    PyTorch numbers the nodes that a thread makes. An operator carries the number of its thread's next node. So the last
    operator with a number made the node; earlier ones needed no gradient and made none. A node's event carries the
    node's number, and in `Fwd thread id` an id of the thread that appears nowhere else in the trace. The thread that
    shares most node numbers with the id is taken for it.
    """
    columns = ["thread", "sequence", "forward_thread", "start_ns"]
    numbered = events[columns].assign(event=events.index, is_engine=is_engine)
    numbered = numbered[numbered.sequence != NONE]
    is_node = numbered.forward_thread > 0
    # Events of a thread are in the order of their starts.
    creators = numbered[~is_node].drop_duplicates(["thread", "sequence"], keep="last")
    pairs = numbered[is_node & numbered.is_engine].merge(creators, on="sequence", suffixes=("", "_made"))
    keys = ["forward_thread", "thread_made"]
    best = pairs.groupby(keys).sequence.nunique().groupby("forward_thread").idxmax()
    # A node from before the trace may have a number that the trace has on another thread, or later: drop these pairs.
    is_made = pairs.set_index(keys).index.isin(best) & (pairs.start_ns_made <= pairs.start_ns)
    return dict(zip(pairs.event[is_made].tolist(), pairs.event_made[is_made].tolist(), strict=True))
