"""When each phase ran, by the ranges on the host: lmbench's own, Lightning's, or what the operators tell."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from lmbench.errors import UsageError
from lmbench.kernels.trace.events import NONE, Events, HostEvents, Integers
from lmbench.kernels.trace.scopes import ENGINE, flatten, forward_of_nodes, parents
from lmbench.records.ranges import PHASE, STEP
from lmbench.records.vocabulary import PHASES, Phase

#: A phase, or where a kernel lies whose launch is in none, or that has no launch in the trace.
TracePhase = Literal[Phase, "outside", "unlinked"]
OUTSIDE: Final = "outside"
UNLINKED: Final = "unlinked"
#: What is no part of a step.
NO_PHASE: Final[tuple[TracePhase, ...]] = (OUTSIDE, UNLINKED)
#: The order of phases in tables.
PHASE_ORDER: tuple[TracePhase, ...] = (*PHASES, *NO_PHASE)

# Ranges of Lightning's PyTorchProfiler and of PyTorch itself. The optimizer's contain forward and backward (the closure
# runs inside): the innermost range has the time.
_FOREIGN: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    ("forward", re.compile(r"\[Strategy\]\w+\.(training|validation|test|predict)_step$")),
    ("backward", re.compile(r"\[Strategy\]\w+\.backward$")),
    ("clip", re.compile(r"\.configure_gradient_clipping$")),
    ("zero_grad", re.compile(r"\.optimizer_zero_grad$|^Optimizer\.zero_grad#")),
    ("optimizer", re.compile(r"\.optimizer_step$|^Optimizer\.step#")),
    ("transfer", re.compile(r"\.batch_to_device$")),
    ("data", re.compile(r"\w*dataloader_next$|^enumerate\(DataLoader\)#")),
)
_FOREIGN_STEP = re.compile(r"^ProfilerStep#\d+$")

Range = tuple[int, int, Phase]


@dataclass(frozen=True)
class PhaseTimeline:
    """Pieces of time beside each other, each of one phase.

    `source` says whose ranges they are: `lmbench`, `foreign` or `none`. `steps` is the number of whole steps in the
    trace, 1 where nothing tells (`has_step_count`). `step_start_ns` are the beginnings of lmbench's steps, in order.
    `span_ns` is from the first beginning of a step or a phase to the last end of one, None where nothing tells either.
    """

    start_ns: Integers
    end_ns: Integers
    phases: list[Phase]
    source: str
    steps: int
    has_step_count: bool
    step_start_ns: Integers
    span_ns: tuple[int, int] | None

    def at(self, moments: Integers) -> Integers:
        """The piece around each moment, NONE outside of all."""
        if not len(self.start_ns):
            return np.full(len(moments), NONE, dtype=np.int64)
        piece = np.searchsorted(self.start_ns, moments, side="right") - 1
        return np.where((piece >= 0) & (moments < self.end_ns[piece]), piece, NONE)


def find_phases(events: Events, recorded_steps: int | None) -> PhaseTimeline:
    """The phases of a trace; `recorded_steps` is the number of whole ones by the trace's notes.

    Raises UsageError for one of lmbench's ranges with a phase that lmbench does not know.
    """
    host = events.host
    own: list[Range] = []
    foreign: list[Range] = []
    steps: list[int] = []
    foreign_steps: list[tuple[int, int]] = []
    for index in np.flatnonzero(host.is_range):
        name = host.names[index]
        span = (int(host.start_ns[index]), int(host.end_ns[index]))
        if name.startswith(PHASE):
            own.append((*span, _known(name[len(PHASE) :])))
        elif name.startswith(STEP):
            steps.append(span[0])
        elif _FOREIGN_STEP.match(name):
            foreign_steps.append(span)
        elif phase := next((phase for phase, pattern in _FOREIGN if pattern.search(name)), None):
            foreign.append((*span, phase))
    if own:
        # Each step has a phase or more.
        recorded = recorded_steps if recorded_steps is not None and 0 < recorded_steps <= len(own) else 0
        steps.sort()
        if 0 < recorded < len(steps):
            # The last began and did not end: its kernels are outside, and no mean counts it.
            own = [one for one in own if one[0] < steps[recorded]]
            steps = steps[:recorded]
        return _timeline(own, "lmbench", len(steps) or recorded, steps, [])
    foreign += _inferred(host, {phase for *_, phase in foreign})
    return _timeline(foreign, "foreign" if foreign else "none", len(foreign_steps), [], foreign_steps)


def _known(name: str) -> Phase:
    for phase in PHASES:
        if name == phase:
            return phase
    raise UsageError(f"the trace has a phase {name[:40]!r}, which is none of {', '.join(PHASES)}; record it again")


def _timeline(
    ranges: list[Range], source: str, steps: int, step_starts: list[int], step_spans: list[tuple[int, int]]
) -> PhaseTimeline:
    # Two ranges of the same span would be one piece; a range without a length has no time.
    ranges = sorted({one for one in ranges if one[1] > one[0]})
    start, end, owner = flatten([one[0] for one in ranges], [one[1] for one in ranges])
    phases = [ranges[index][2] for index in owner]
    begun = np.array(step_starts, dtype=np.int64)
    spans = [*step_spans, *(one[:2] for one in ranges)]
    whole = (min(one[0] for one in spans), max(one[1] for one in spans)) if spans else None
    return PhaseTimeline(start, end, phases, source, max(steps, 1), steps > 0, begun, whole)


def _inferred(host: HostEvents, known: set[Phase]) -> Iterable[Range]:
    """Forward and backward where no range tells: the times of operators that the autograd engine runs, and of the
    forward operators that it goes back to."""
    backward = [index for index, name in enumerate(host.names) if name.startswith(ENGINE)]
    parent = parents(host.thread, host.start_ns, host.end_ns)
    forward = {_outermost(host, parent, index) for index in forward_of_nodes(host).tolist() if index != NONE}
    marked: dict[Phase, Iterable[int]] = {"backward": backward, "forward": forward}
    marks = [
        (int(host.start_ns[index]), int(host.end_ns[index]), phase)
        for phase, indices in marked.items()
        for index in indices
    ]
    return [one for one in _hulls(sorted(marks)) if one[2] not in known]


def _outermost(host: HostEvents, parent: Integers, event: int) -> int:
    """The operator around an operator that no other is around."""
    while (above := int(parent[event])) != NONE and not host.is_range[above]:
        event = above
    return event


def _hulls(marks: list[Range]) -> list[Range]:
    """From the first to the last of every unbroken row of marks of one phase."""
    hulls: list[Range] = []
    for start, end, phase in marks:
        if hulls and hulls[-1][2] == phase:
            hulls[-1] = (hulls[-1][0], max(hulls[-1][1], end), phase)
        else:
            hulls.append((start, end, phase))
    return hulls
