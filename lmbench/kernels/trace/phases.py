"""When each phase ran, by the ranges on the host: lmbench's own, Lightning's, or what the operators tell."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from lmbench.errors import UsageError
from lmbench.kernels.trace.events import NONE, Events, HostEvents, Integers
from lmbench.kernels.trace.scopes import ENGINE, flatten, forward_of_nodes, parents
from lmbench.records.vocabulary import PHASE, PHASES, STEP, Phase

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
    `inferred` are phases that no range tells, only what autograd runs.
    """

    start_ns: Integers
    end_ns: Integers
    phases: list[Phase]
    source: str
    steps: int
    has_step_count: bool
    step_start_ns: Integers
    span_ns: tuple[int, int] | None
    inferred: tuple[Phase, ...] = ()

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
    inferred = _inferred(host, {phase for *_, phase in foreign})
    source = "foreign" if foreign or inferred else "none"
    timeline = _timeline([*foreign, *inferred], source, len(foreign_steps), [], foreign_steps)
    return replace(timeline, inferred=tuple(sorted({phase for *_, phase in inferred}, key=PHASES.index)))


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


def _inferred(host: HostEvents, known: set[Phase]) -> list[Range]:
    """Forward and backward where no range tells: the times of operators that the autograd engine runs, and of the
    forward operators that it goes back to.

    What the engine runs forward again, of a checkpoint, is its own. A backward pass ends where the thread that runs
    models does something else: schedules of pipelines go forward between two of them.
    """
    top = _outermost(host)
    is_engine = np.array([name.startswith(ENGINE) for name in host.names], dtype=np.bool_)
    backward = np.flatnonzero(is_engine)
    made = forward_of_nodes(host)
    forward = np.unique(top[made[made != NONE]])
    forward = forward[~is_engine[forward]]
    found: list[Range] = []
    if "forward" not in known:
        found += _hulls(host, forward, backward, "forward")
    if "backward" not in known:
        # Where operators are noted for a backward pass, outside of one, models run.
        noted = np.flatnonzero((host.sequence != NONE) & ~host.is_range & ~is_engine[top])
        is_models = host.thread == (np.bincount(host.thread[noted]).argmax() if len(noted) else NONE)
        others = np.unique(top[is_models & ~host.is_range & ~is_engine[top]])
        found += _hulls(host, backward, others, "backward")
    return found


def _outermost(host: HostEvents) -> Integers:
    """For each event the operator around it that no other is around."""
    parent = parents(host.thread, host.start_ns, host.end_ns)
    itself = np.arange(len(parent))
    is_inside = (parent != NONE) & ~host.is_range[parent] if len(parent) else parent != NONE
    top: Integers = np.where(is_inside, parent, itself)
    while (top != top[top]).any():
        top = top[top]
    return top


def _hulls(host: HostEvents, members: Integers, others: Integers, phase: Phase) -> list[Range]:
    """From the first to the last of every row of members that none of the others interrupts."""
    marks = sorted(
        (int(host.start_ns[index]), int(host.end_ns[index]), is_member)
        for indices, is_member in ((members, True), (others, False))
        for index in indices
    )
    hulls: list[Range] = []
    is_row = False
    for start, end, is_member in marks:
        if is_member and is_row:
            hulls[-1] = (hulls[-1][0], max(hulls[-1][1], end), phase)
        elif is_member:
            hulls.append((start, end, phase))
        is_row = is_member
    return hulls
