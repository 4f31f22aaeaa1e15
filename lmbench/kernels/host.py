"""What every event of the host works for: by the events around it, and by the forward operator behind a backward node.

All by time stamps, and by the numbers that autograd gives its nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise, takewhile

import numpy as np
import pandas as pd

from lmbench.kernels.events import MODULE_CALL, Events, is_range, users_ranges, where
from lmbench.kernels.names import module_path, operator_part, part_of
from lmbench.records.intervals import NONE, Flags, Integers
from lmbench.records.vocabulary import MODULE

#: The beginning of the name of an event in which autograd's engine runs a node.
ENGINE = "autograd::engine::evaluate_function: "
#: The end of the name of a node that stores a gradient.
ACCUMULATE = "torch::autograd::AccumulateGrad"
_MODULES = (MODULE, "[pl][module]", MODULE_CALL)
# A matrix product as attention uses for scores and values.
_PRODUCT = re.compile(r"^aten::(matmul|bmm|baddbmm|einsum)$")
# Directly in a block an addition is the residual's.
_SUM = re.compile(r"^aten::(add|add_)$")


class Nesting:
    """Events of the host that contain each other, by thread, then start, then the longer first.

    `parent` is the index of the innermost event around each, NONE at the top. One that begins inside another and ends
    after it is that one's child all the same.
    """

    def __init__(self, events: Events) -> None:
        self.names: list[str] = events.name.tolist()
        self._events = events
        parent: list[int] = []
        opened: list[int] = []
        ends, threads = events.end_ns.tolist(), events.thread.tolist()
        for index, start in enumerate(events.start_ns.tolist()):
            while opened and (ends[opened[-1]] <= start or threads[opened[-1]] != threads[index]):
                opened.pop()
            parent.append(opened[-1] if opened else NONE)
            opened.append(index)
        self.parent = np.array(parent, dtype=np.int64)

    def around(self, thread: Integers, moments: Integers) -> Integers:
        """The index of the innermost event around each moment on its thread, NONE where there is none."""
        innermost = np.full(len(moments), NONE, dtype=np.int64)
        start_ns, end_ns = self._events.start_ns, self._events.end_ns
        for value in np.unique(thread) if self.names else ():
            first, past = np.searchsorted(self._events.thread, [value, value + 1])
            rows = np.flatnonzero(thread == value)
            index = first + np.searchsorted(start_ns[first:past], moments[rows], side="right") - 1
            index = np.where(index < first, NONE, index)
            # From the event that began last outwards to one that has not ended.
            while (is_over := (index != NONE) & (end_ns[index] <= moments[rows])).any():
                index = np.where(is_over, self.parent[index], index)
            innermost[rows] = index
        return innermost

    def climb(self, event: int) -> Iterator[int]:
        """The event, and from the innermost to the outermost all that are around it."""
        while event != NONE:
            yield event
            event = int(self.parent[event])

    def innermost(self, is_member: Flags) -> Integers:
        """The index of the innermost of these events around each event, or of itself; NONE where there is none."""
        return settled(np.append(np.where(is_member, np.arange(len(is_member)), self.parent), NONE))[:-1]


def settled(links: Integers) -> Integers:
    """Where links lead that are followed until one leads to itself."""
    while (links != links[links]).any():
        links = links[links]
    return links


class Host:
    """Operators and modules of the host, without the ranges that begin and end across them (phases, steps, a user's
    own), and the part of the model that each works for.

    `is_engine` are events of autograd's engine around a node of the backward pass; `forward` has the forward operator
    that made the node; without ranges of modules only operators tell a part. `is_model` are the outermost ranges of
    modules outside of the engine. `users` are the ranges that are neither of modules nor of any tool.

    Args:
        host: all events of the host.
        classes: class name by module path, for modules whose own name tells no part.
    """

    def __init__(self, host: Events, classes: Mapping[str, str]) -> None:
        events = host[~is_range(host) | where(host.name, lambda name: name.startswith(_MODULES))]
        self.events, self.nesting, self.users = events, Nesting(events), Nesting(users_ranges(host))
        self._start_ns, self._sequence = events.start_ns, events.sequence
        names = self.names = self.nesting.names
        self.is_engine = where(names, lambda name: name.startswith(ENGINE))
        self.forward = _forward_operators(events, self.is_engine)
        # The innermost module range or event of the engine around (or at) each event.
        is_module = where(names, lambda name: name.startswith(_MODULES))
        scope = self.nesting.innermost(self.is_engine | is_module)
        self.is_model = is_module & (np.append(scope, NONE)[self.nesting.parent] == NONE)
        self._scope = scope.tolist()
        # When the first softmax directly in a module range began.
        self._softmax_ns: dict[int, int] = {}
        for index in np.flatnonzero(where(names, lambda name: operator_part(name) == "softmax")).tolist():
            self._softmax_ns.setdefault(self._scope[index], int(self._start_ns[index]))
        # On its thread: what the engine ran before, and what it runs next that stores no gradient.
        is_storing = where(names, lambda name: name.endswith(ACCUMULATE))
        self._previous = {later: event for event, later in _pairs(events, self.is_engine)}
        self._following = dict(_pairs(events, self.is_engine & ~is_storing))
        paths = {path for name in set(names) if (path := module_path(name)) is not None}
        self._part_of_path = {path: part_of(path, classes) for path in paths}
        norms = (path.split(".") for path, part in self._part_of_path.items() if part == "norm")
        self._blocks = {".".join(path[:-1]) for path in norms if any(map(str.isdecimal, path))}
        self._parts: dict[int, str | None] = {NONE: None}

    def part(self, event: int) -> str | None:
        """Part of the work that an event launched, None where nothing tells, or for NONE."""
        if event not in self._parts:
            # Set before: a damaged trace may go round in circles.
            self._parts[event] = None
            scope = self._scope[event]
            # The event and those around it, up to a scope without it; the innermost that tells a part by its name.
            inside = [*takewhile(lambda index: index != scope, self.nesting.climb(event))]
            by_operator = next(filter(None, (operator_part(self.names[index]) for index in inside)), None)
            if scope != NONE and self.is_engine[scope]:
                self._parts[event] = self._of_node(scope, inside) or by_operator
            else:
                self._parts[event] = self._of_module(scope, inside, by_operator)
        return self._parts[event]

    def _of_module(self, scope: int, inside: list[int], by_operator: str | None) -> str | None:
        # A path names the modules around, a class alone does not.
        paths = [module_path(self.names[index]) or "" for index in self.nesting.climb(scope)]
        path = paths[0] if paths else ""
        part = next(filter(None, map(self._part_of_path.get, paths)), None)
        if part in (None, "attention") and by_operator:
            return by_operator
        if part is None and path in self._blocks and inside and _SUM.match(self.names[inside[0]]):
            # An addition directly in a module that has norms below it.
            return "residual"
        if part == "attention" and scope in self._softmax_ns:
            # Of products directly in an attention module, scores come before its softmax, values after.
            for product in (index for index in inside if _PRODUCT.match(self.names[index])):
                return "scores" if self._start_ns[product] < self._softmax_ns[scope] else "values"
        return part

    def _of_node(self, engine: int, inside: list[int]) -> str | None:
        """A node has its forward operator's part; a gradient is stored on behalf of the node that made it."""
        node = self.names[engine]
        is_sum = bool(inside and _SUM.match(self.names[inside[0]])) and not node.endswith(ACCUMULATE)
        # In the engine's event but not in the node's own function: of two gradients of one tensor.
        if is_sum and ENGINE + self.names[inside[-1]] != node and self._ends_at_residual(engine):
            return "residual"
        while self.names[engine].endswith(ACCUMULATE) and engine in self._previous:
            engine = self._previous[engine]
        return self._forward_part(engine) or operator_part(self.names[engine].removeprefix(ENGINE))

    def _ends_at_residual(self, engine: int) -> bool:
        """Whether the tensor is the residual stream's: its next node is of a residual addition or of the embedding, and
        the other gradient can have come through a residual addition behind it."""
        if self._forward_part(self._following.get(engine, NONE)) not in ("residual", "embedding"):
            return False
        # Within one backward pass the engine goes down in sequence numbers.
        number, before = self._sequence[engine], self._previous.get(engine)
        while before is not None and (self._sequence[before] >= number or self._sequence[before] == NONE):
            if self._forward_part(before) == "residual":
                return True
            number, before = max(number, self._sequence[before]), self._previous.get(before)
        return False

    def _forward_part(self, engine: int) -> str | None:
        return self.part(self.forward.get(engine, NONE))


def _pairs(events: Events, rows: Flags) -> list[tuple[int, int]]:
    """Neighbours among some events that are on one thread."""
    thread = events.thread
    return [(a, b) for a, b in pairwise(np.flatnonzero(rows).tolist()) if thread[a] == thread[b]]


def _forward_operators(events: Events, is_engine: Flags) -> dict[int, int]:
    """For events of the engine the forward operator that made their node, as far as that can be told.

    PyTorch numbers the nodes that a thread makes; an operator carries the number that the thread's next node will have,
    so that the last operator to begin with a number is the one that made the node (an operator that needs no gradient
    makes none, and the next one carries the same number). A node's event carries its number, and under `Fwd thread id`
    one for the thread, which stands nowhere else in the trace: the thread is the one that has most of these numbers.
    """
    columns = ["thread", "sequence", "forward_thread", "start_ns"]
    numbered = pd.DataFrame.from_records(events)[columns].assign(event=range(len(events)), is_engine=is_engine)
    numbered = numbered[numbered.sequence != NONE]
    is_node = numbered.forward_thread > 0
    # Events of a thread stand in the order of their starts.
    creators = numbered[~is_node].drop_duplicates(["thread", "sequence"], keep="last")
    pairs = numbered[is_node & numbered.is_engine].merge(creators, on="sequence", suffixes=("", "_made"))
    keys = ["forward_thread", "thread_made"]
    common = pairs.groupby(keys).sequence.nunique().groupby("forward_thread").idxmax()
    # A number of a node that was made before the trace began can come again on another thread.
    is_made = pairs.set_index(keys).index.isin(common) & (pairs.start_ns_made <= pairs.start_ns)
    return dict(zip(pairs.event[is_made].tolist(), pairs.event_made[is_made].tolist(), strict=True))
