"""What every event of the host works for: by the events around it, and by the forward operator behind a backward node.

All by time stamps, and by the numbers that autograd gives its nodes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile
from operator import itemgetter

import numpy as np

from lmbench.kernels.events import Events
from lmbench.kernels.parts import module_path, operator_part, part_of
from lmbench.records.intervals import NONE, Flags, Integers
from lmbench.records.vocabulary import MODULE

#: The beginning of the name of an event in which autograd's engine runs a node.
ENGINE = "autograd::engine::evaluate_function: "
#: The end of the name of a node that stores a gradient.
ACCUMULATE = "torch::autograd::AccumulateGrad"
_MODULES = (MODULE, "[pl][module]")
# A matrix product as attention uses for scores and values.
_PRODUCT = re.compile(r"^aten::(matmul|bmm|baddbmm|einsum)$")
# Directly in a block an addition is the residual's.
_SUM = re.compile(r"^aten::(add|add_)$")


@dataclass(frozen=True)
class Nesting:
    """Events that contain each other, by place (threads or streams), then start, then the longer first.

    `parent` is the index of the innermost event around each, NONE at the top. One that begins inside another and ends
    after it is that one's child all the same.
    """

    names: list[str]
    place: Integers
    start_ns: Integers
    end_ns: Integers
    parent: Integers

    @classmethod
    def of(cls, events: Events, place: Integers) -> Nesting:
        """The nesting of events at their places (one of their columns)."""
        parent: list[int] = []
        opened: list[int] = []
        ends, places = events.end_ns.tolist(), place.tolist()
        for index, start in enumerate(events.start_ns.tolist()):
            while opened and (ends[opened[-1]] <= start or places[opened[-1]] != places[index]):
                opened.pop()
            parent.append(opened[-1] if opened else NONE)
            opened.append(index)
        return cls(events.names.tolist(), place, events.start_ns, events.end_ns, np.array(parent, dtype=np.int64))

    def around(self, place: Integers, moments: Integers) -> Integers:
        """The index of the innermost event around each moment at its place, NONE where there is none."""
        innermost = np.full(len(moments), NONE, dtype=np.int64)
        for value in np.unique(place) if len(self.names) else ():
            first, past = np.searchsorted(self.place, [value, value + 1])
            rows = np.flatnonzero(place == value)
            index = first + np.searchsorted(self.start_ns[first:past], moments[rows], side="right") - 1
            index = np.where(index < first, NONE, index)
            # From the event that began last outwards to one that has not ended.
            while (is_over := (index != NONE) & (self.end_ns[index] <= moments[rows])).any():
                index = np.where(is_over, self.parent[index], index)
            innermost[rows] = index
        return innermost

    def climb(self, event: int) -> Iterator[int]:
        """The event, and from the innermost to the outermost all that are around it."""
        while event != NONE:
            yield event
            event = int(self.parent[event])


class Host:
    """Operators and modules of the host, without the ranges that begin and end across them (phases, steps, a user's
    own), and the part of the model that each works for.

    Args:
        host: all events of the host.
        classes: class name by module path, for modules whose own name tells no part.
    """

    def __init__(self, host: Events, classes: Mapping[str, str]) -> None:
        self.events = host.take(~host.is_range | host.where(lambda name: name.startswith(_MODULES)))
        self.nesting = Nesting.of(self.events, self.events.thread)
        self.names = self.nesting.names
        #: Events of autograd's engine around a node of the backward pass.
        self.is_engine = self.events.where(lambda name: name.startswith(ENGINE))
        self._parts: dict[int, str | None] = {}
        paths = {path for name in set(self.names) if (path := module_path(name)) is not None}
        #: Without ranges of modules only operators tell a part.
        self.has_modules = bool(paths)
        self._part_of_path = {path: part_of(path, classes) for path in paths}
        norms = (path.split(".") for path, part in self._part_of_path.items() if part == "norm")
        self._blocks = {".".join(names[:-1]) for names in norms if any(name.isdecimal() for name in names)}

    def scope(self, event: int) -> int:
        """The innermost module range or event of the engine around (or at) an event, NONE if there is none."""
        scopes = (index for index in self.nesting.climb(event) if self.names[index].startswith((ENGINE, *_MODULES)))
        return next(scopes, NONE)

    def child(self, event: int, ancestor: int) -> int:
        """The event directly in an ancestor that an event lies in (or is), NONE if there is none."""
        inside = (index for index in self.nesting.climb(event) if self.nesting.parent[index] == ancestor)
        return next(inside, NONE)

    def part(self, event: int) -> str | None:
        """Part of the work that an event launched, None where nothing tells."""
        if event == NONE:
            return None
        if event not in self._parts:
            # Set before: a damaged trace may go round in circles.
            self._parts[event] = None
            scope = self.scope(event)
            is_backward = scope != NONE and self.is_engine[scope]
            self._parts[event] = self._in_backward(event, scope) if is_backward else self._in_module(event, scope)
        return self._parts[event]

    def is_first_gradient(self, event: int) -> bool:
        """Whether an event of the backward phase makes the gradient that it starts from: `loss.backward()` itself calls
        `ones_like`, outside of the engine and of every module."""
        around = [self.names[index] for index in self.nesting.climb(event)]
        return around[-1:] == ["aten::ones_like"] and self.scope(event) == NONE

    def _in_module(self, event: int, scope: int) -> str | None:
        path = "" if scope == NONE else module_path(self.names[scope]) or ""
        part = self._part_of_path.get(path)
        if part not in (None, "attention"):
            return part
        if by_operator := self._by_operator(event, scope):
            return by_operator
        if part is None:
            # An addition directly in a module that has norms below it is a residual's.
            return "residual" if path in self._blocks and _SUM.match(self.names[event]) else None
        # Of products directly in an attention module, scores come before its softmax, values after.
        softmax_ns = self._softmax_ns.get(scope)
        product = next((i for i in self._inside(event, scope) if _PRODUCT.match(self.names[i])), NONE)
        if softmax_ns is None or product == NONE:
            return part
        return "scores" if self.events.start_ns[product] < softmax_ns else "values"

    def _in_backward(self, event: int, engine: int) -> str | None:
        """A node has its forward operator's part; a gradient is stored on behalf of the node that made it."""
        node, child = self.names[engine], self.child(event, engine)
        # In the engine's event but not in the node's own function: of two gradients of one tensor.
        is_gradient_sum = _SUM.match(self.names[event]) and (child == NONE or ENGINE + self.names[child] != node)
        if is_gradient_sum and not node.endswith(ACCUMULATE) and self._ends_at_residual(engine):
            return "residual"
        while self.names[engine].endswith(ACCUMULATE) and engine in self._previous:
            engine = self._previous[engine]
        by_node = self._forward_part(engine) or operator_part(self.names[engine].removeprefix(ENGINE))
        return by_node or self._by_operator(event, engine)

    def _ends_at_residual(self, engine: int) -> bool:
        """Whether the tensor is the residual stream's: its next node is of a residual addition or of the embedding, and
        the other gradient can have come through a residual addition behind it."""
        if self._forward_part(self._following.get(engine, NONE)) not in ("residual", "embedding"):
            return False
        # Within one backward pass the engine goes down in sequence numbers.
        sequence, before = self.events.sequence, self._previous.get(engine)
        number = sequence[engine]
        while before is not None and (sequence[before] >= number or sequence[before] == NONE):
            if self._forward_part(before) == "residual":
                return True
            number, before = max(number, sequence[before]), self._previous.get(before)
        return False

    def _forward_part(self, engine: int) -> str | None:
        return self.part(self.forward.get(engine, NONE))

    def _inside(self, event: int, scope: int) -> Iterator[int]:
        """The event and those around it, up to a scope without it."""
        return takewhile(lambda index: index != scope, self.nesting.climb(event))

    def _by_operator(self, event: int, scope: int) -> str | None:
        """The innermost operator up to the scope that tells a part by its name."""
        return next(filter(None, (operator_part(self.names[index]) for index in self._inside(event, scope))), None)

    @cached_property
    def _softmax_ns(self) -> dict[int, int]:
        """By module range, when the first softmax directly in it began."""
        is_softmax = self.events.where(lambda name: operator_part(name) == "softmax")
        begun = [(self.scope(index), int(self.events.start_ns[index])) for index in np.flatnonzero(is_softmax).tolist()]
        return dict(sorted(begun, key=itemgetter(1), reverse=True))

    @cached_property
    def _previous(self) -> dict[int, int]:
        """For each event of the engine the one before it on its thread."""
        return {later: earlier for earlier, later in self._on_a_thread(self.is_engine)}

    @cached_property
    def _following(self) -> dict[int, int]:
        """For each event of the engine that stores no gradient the next such on its thread."""
        return dict(self._on_a_thread(self.is_engine & ~self.events.where(lambda name: name.endswith(ACCUMULATE))))

    def _on_a_thread(self, rows: Flags) -> list[tuple[int, int]]:
        thread = self.events.thread
        return [(a, b) for a, b in pairwise(np.flatnonzero(rows).tolist()) if thread[a] == thread[b]]

    @cached_property
    def forward(self) -> dict[int, int]:
        """For events of the engine the forward operator that made their node, as far as that can be told.

        PyTorch numbers the nodes that a thread makes; an operator carries the number that the thread's next node will
        have, so that the last operator to begin with a number is the one that made the node (an operator that needs no
        gradient makes none, and the next one carries the same number). A node's event carries its number, and under
        `Fwd thread id` one for the thread, which stands nowhere else in the trace: the thread is the one that has most
        of these numbers.
        """
        sequence, thread, events = self.events.sequence, self.events.thread, self.events
        has_number = sequence != NONE
        creators: dict[int, dict[int, int]] = defaultdict(dict)
        # Events of a thread stand in the order of their starts: the last with a number replaces earlier ones.
        for index in np.flatnonzero(has_number & (events.forward_thread <= 0)).tolist():
            creators[int(thread[index])][int(sequence[index])] = index
        nodes: dict[int, list[int]] = defaultdict(list)
        for index in np.flatnonzero(has_number & (events.forward_thread > 0) & self.is_engine).tolist():
            nodes[int(events.forward_thread[index])].append(index)
        operators: dict[int, int] = {}
        for members in nodes.values():
            numbers = set(sequence[members].tolist())
            of_thread = max(creators.values(), key=lambda known: len(numbers & known.keys()), default={})
            for node in members:
                creator = of_thread.get(int(sequence[node]))
                # A number of a node that was made before the trace began can come again on another thread.
                if creator is not None and events.start_ns[creator] <= events.start_ns[node]:
                    operators[node] = creator
        return operators
