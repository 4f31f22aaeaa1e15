"""When each phase ran, by the ranges on the host: lmbench's own, Lightning's, or what the operators tell."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from lmbench.errors import UsageError
from lmbench.kernels.events import Events, is_range
from lmbench.kernels.host import Host, settled
from lmbench.kernels.names import reader
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

_foreign_phase = reader("foreign_phases")
_FOREIGN_STEP = re.compile(r"^ProfilerStep#\d+$")

_Range = tuple[int, int, str]


@dataclass(frozen=True)
class PhaseTimeline:
    """Pieces of time beside each other, each of one phase.

    `source` says whose ranges they are: `lmbench`, `foreign` or `none`. `steps` is the number of whole steps in the
    trace, 1 where nothing tells (`has_step_count`). `step_ns` has a row with start and end for each step that has a
    range, in order. `inferred` are phases that no range tells, only what autograd runs.
    """

    start_ns: Integers
    end_ns: Integers
    phases: list[str]
    source: str
    steps: int
    has_step_count: bool
    step_ns: Integers
    inferred: tuple[str, ...]

    def at(self, moments: Integers) -> list[str]:
        """The phase of each moment."""
        # NONE reads what stands behind the last.
        named = [*self.phases, OUTSIDE]
        return [named[index] for index in locate(self.start_ns, self.end_ns, moments)]


def find_phases(events: Events, host: Host, recorded_steps: int | None) -> PhaseTimeline:
    """The phases of a trace by its ranges and operators; `recorded_steps` is the number of whole steps by its notes.

    Raises UsageError for one of lmbench's ranges with a phase that lmbench does not know.
    """
    ranges = events[is_range(events)]
    spans = [*zip(ranges.name.tolist(), ranges.start_ns.tolist(), ranges.end_ns.tolist(), strict=True)]
    pieces = [(start, end, name.removeprefix(PHASE)) for name, start, end in spans if name.startswith(PHASE)]
    if unknown := {phase for *_, phase in pieces}.difference(PHASES):
        raise UsageError(f"the trace has a phase {min(unknown)[:40]!r}, which is none of {', '.join(PHASES)}")
    inferred: list[_Range] = []
    if pieces:
        source, step_spans = "lmbench", sorted((start, end) for name, start, end in spans if name.startswith(STEP))
        # Each step has a phase or more.
        count = recorded_steps if recorded_steps is not None and 0 < recorded_steps <= len(pieces) else 0
        if 0 < count < len(step_spans):
            # The last began and did not end: its kernels are outside, and no mean counts it.
            pieces = [piece for piece in pieces if piece[0] < step_spans[count][0]]
            step_spans = step_spans[:count]
        steps = len(step_spans) or count
    else:
        pieces = [(start, end, phase) for name, start, end in spans if (phase := _foreign_phase(name))]
        inferred = _inferred(host, {phase for *_, phase in pieces})
        step_spans = sorted((start, end) for name, start, end in spans if _FOREIGN_STEP.match(name))
        pieces, steps = pieces + inferred, len(step_spans)
        source = "foreign" if pieces else "none"
    # A range without a length has no time.
    pieces = [piece for piece in pieces if piece[1] > piece[0]]
    start, end, owner = paint(*np.array([piece[:2] for piece in pieces], dtype=np.int64).reshape(-1, 2).T)
    return PhaseTimeline(
        start,
        end,
        [pieces[index][2] for index in owner],
        source,
        max(steps, 1),
        steps > 0,
        np.array(step_spans, dtype=np.int64).reshape(-1, 2),
        tuple(phase for phase in PHASES if any(phase == piece[2] for piece in inferred)),
    )


def _inferred(host: Host, known: set[str]) -> list[_Range]:
    """Forward and backward where no range tells: the times of operators that the autograd engine runs, and of the
    forward operators that it goes back to.

    What the engine runs forward again, of a checkpoint, is its own. A backward pass ends where the thread that runs
    models does something else: schedules of pipelines go forward between two of them.
    """
    events, is_engine, parent = host.events, host.is_engine, host.nesting.parent
    is_module = is_range(events)
    # For each event the operator around it that no other is around.
    top = settled(np.where((parent != NONE) & ~is_module[parent], parent, np.arange(len(parent))))
    is_other = ~is_module & ~is_engine[top]
    inferred: list[_Range] = []
    if "forward" not in known:
        is_forward = np.isin(np.arange(len(top)), top[[*host.forward.values()]]) & ~is_engine
        inferred += _hulls(events, is_forward, is_engine, "forward")
    if "backward" not in known:
        # Where operators are noted for a backward pass, outside of one, models run.
        noted = events.thread[(events.sequence != NONE) & is_other]
        is_models = events.thread == (np.bincount(noted).argmax() if len(noted) else NONE)
        is_between = np.isin(np.arange(len(top)), top[is_models & is_other])
        inferred += _hulls(events, is_engine, is_between, "backward")
    return inferred


def _hulls(events: Events, is_member: Flags, is_other: Flags, phase: Phase) -> list[_Range]:
    """From the first to the last of every row of members that none of the others interrupts."""
    rows = np.flatnonzero(is_member | is_other)
    rows = rows[np.lexsort((is_member[rows], events.end_ns[rows], events.start_ns[rows]))]
    is_in = is_member[rows]
    first = np.flatnonzero(is_in & ~np.append(False, is_in[:-1])[: len(is_in)])
    if not len(first):
        return []
    last = np.maximum.reduceat(np.where(is_in, events.end_ns[rows], 0), first)
    return [
        (start, end, phase) for start, end in zip(events.start_ns[rows][first].tolist(), last.tolist(), strict=True)
    ]
