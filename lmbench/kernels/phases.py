"""When each phase ran, by the ranges on the host: lmbench's own, Lightning's, or what the operators tell."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from lmbench.errors import UsageError
from lmbench.kernels.events import Events
from lmbench.kernels.host import Host
from lmbench.records.intervals import NONE, Flags, Integers, locate, paint
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
_FOREIGN: dict[Phase, re.Pattern[str]] = {
    "forward": re.compile(r"\[Strategy\]\w+\.(training|validation|test|predict)_step$"),
    "backward": re.compile(r"\[Strategy\]\w+\.backward$"),
    "clip": re.compile(r"\.configure_gradient_clipping$"),
    "zero_grad": re.compile(r"\.optimizer_zero_grad$|^Optimizer\.zero_grad#"),
    "optimizer": re.compile(r"\.optimizer_step$|^Optimizer\.step#"),
    "transfer": re.compile(r"\.batch_to_device$"),
    "data": re.compile(r"\w*dataloader_next$|^enumerate\(DataLoader\)#"),
}
_FOREIGN_STEP = re.compile(r"^ProfilerStep#\d+$")

_Range = tuple[int, int, Phase]


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

    def at(self, moments: Integers) -> list[TracePhase]:
        """The phase of each moment."""
        return [OUTSIDE if i == NONE else self.phases[i] for i in locate(self.start_ns, self.end_ns, moments).tolist()]


def find_phases(events: Events, host: Host, recorded_steps: int | None) -> PhaseTimeline:
    """The phases of a trace by its ranges and operators; `recorded_steps` is the number of whole steps by its notes.

    Raises UsageError for one of lmbench's ranges with a phase that lmbench does not know.
    """
    ranges = events.take(events.is_range)
    spans = list(zip(ranges.names.tolist(), ranges.start_ns.tolist(), ranges.end_ns.tolist(), strict=True))
    recorded = [(start, end, _known(name[len(PHASE) :])) for name, start, end in spans if name.startswith(PHASE)]
    if recorded:
        steps = sorted(start for name, start, _ in spans if name.startswith(STEP))
        # Each step has a phase or more.
        count = recorded_steps if recorded_steps is not None and 0 < recorded_steps <= len(recorded) else 0
        if 0 < count < len(steps):
            # The last began and did not end: its kernels are outside, and no mean counts it.
            recorded = [piece for piece in recorded if piece[0] < steps[count]]
            steps = steps[:count]
        return _timeline(recorded, "lmbench", len(steps) or count, steps, [])
    foreign = [
        (start, end, phase) for name, start, end in spans for phase, pattern in _FOREIGN.items() if pattern.search(name)
    ]
    foreign_steps = [(start, end) for name, start, end in spans if _FOREIGN_STEP.match(name)]
    inferred = _inferred(host, {phase for *_, phase in foreign})
    source = "foreign" if foreign or inferred else "none"
    return _timeline([*foreign, *inferred], source, len(foreign_steps), [], foreign_steps, inferred)


def _known(name: str) -> Phase:
    if name not in PHASES:
        raise UsageError(f"the trace has a phase {name[:40]!r}, which is none of {', '.join(PHASES)}; record it again")
    return PHASES[PHASES.index(name)]


def _timeline(
    ranges: list[_Range],
    source: str,
    steps: int,
    step_starts: list[int],
    step_spans: list[tuple[int, int]],
    inferred: list[_Range] | None = None,
) -> PhaseTimeline:
    # A range without a length has no time.
    ranges = [(start, end, phase) for start, end, phase in ranges if end > start]
    times = np.array([(start, end) for start, end, _ in ranges] + step_spans, dtype=np.int64).reshape(-1, 2)
    start, end, owner = paint(*times[: len(ranges)].T)
    return PhaseTimeline(
        start,
        end,
        [ranges[index][2] for index in owner],
        source,
        max(steps, 1),
        steps > 0,
        np.array(step_starts, dtype=np.int64),
        (int(times[:, 0].min()), int(times[:, 1].max())) if len(times) else None,
        tuple(sorted({phase for *_, phase in inferred or []}, key=PHASES.index)),
    )


def _inferred(host: Host, known: set[Phase]) -> list[_Range]:
    """Forward and backward where no range tells: the times of operators that the autograd engine runs, and of the
    forward operators that it goes back to.

    What the engine runs forward again, of a checkpoint, is its own. A backward pass ends where the thread that runs
    models does something else: schedules of pipelines go forward between two of them.
    """
    events, is_engine, is_range = host.events, host.is_engine, host.events.is_range
    # For each event the operator around it that no other is around.
    parent = host.nesting.parent
    top = np.where((parent != NONE) & ~is_range[parent], parent, np.arange(len(parent)))
    while (top != top[top]).any():
        top = top[top]
    is_top_engine = is_engine[top]
    inferred: list[_Range] = []
    if "forward" not in known:
        is_forward = np.zeros(len(events), dtype=np.bool_)
        is_forward[top[list(host.forward.values())]] = True
        inferred += _hulls(events, is_forward & ~is_engine, is_engine, "forward")
    if "backward" not in known:
        # Where operators are noted for a backward pass, outside of one, models run.
        noted = events.thread[(events.sequence != NONE) & ~is_range & ~is_top_engine]
        is_models = events.thread == (np.bincount(noted).argmax() if len(noted) else NONE)
        is_other = np.zeros(len(events), dtype=np.bool_)
        is_other[top[is_models & ~is_range & ~is_top_engine]] = True
        inferred += _hulls(events, is_engine, is_other, "backward")
    return inferred


def _hulls(events: Events, is_member: Flags, is_other: Flags, phase: Phase) -> list[_Range]:
    """From the first to the last of every row of members that none of the others interrupts."""
    marks = events.take(order := np.flatnonzero(is_member | is_other))
    rows = np.lexsort((is_member[order], marks.end_ns, marks.start_ns))
    start, end, is_in = marks.start_ns[rows], marks.end_ns[rows], is_member[order][rows]
    first = np.flatnonzero(is_in & ~np.append(False, is_in[:-1])[: len(is_in)])
    if not len(first):
        return []
    last = np.maximum.reduceat(np.where(is_in, end, 0), first)
    return [(begin, stop, phase) for begin, stop in zip(start[first].tolist(), last.tolist(), strict=True)]
