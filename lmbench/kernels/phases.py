"""When each phase ran, by the ranges on the host: lmbench's own, Lightning's, or what the operators tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import pandas as pd

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

_foreign_phase, _users_phase = reader("foreign_phases"), reader("users_phases")


@dataclass(frozen=True)
class PhaseTimeline:
    """Pieces of time beside each other, each of one phase.

    `source` says whose ranges they are: `lmbench`, `foreign` or `none`. `steps` is the number of whole steps in the
    trace, 1 where nothing tells (`has_step_count`). `step_ns` has a row with start and end for each step, in order, and
    `step_names` the names of their ranges, which without a range for each step are those of the optimizer that ends it.
    `inferred` are phases that no range tells, only what autograd runs.
    """

    start_ns: Integers
    end_ns: Integers
    phases: list[str]
    source: str
    steps: int
    has_step_count: bool
    step_ns: Integers
    step_names: list[str]
    inferred: tuple[str, ...]

    @property
    def skipped(self) -> int:
        """Steps that no clock counts: of several of lmbench's the first, since the recording starts on an idle device,
        where the host first has to get ahead."""
        return int(self.source == "lmbench" and 1 < len(self.step_ns) == self.steps)

    def at(self, moments: Integers) -> list[str]:
        """The phase of each moment."""
        # NONE reads what stands behind the last.
        named = [*self.phases, OUTSIDE]
        return [named[index] for index in locate(self.start_ns, self.end_ns, moments)]


def find_phases(events: Events, host: Host, recorded_steps: int | None) -> PhaseTimeline:
    """The phases of a trace by its ranges and operators; `recorded_steps` is the number of whole steps by its notes.

    Raises UsageError for one of lmbench's ranges with a phase that lmbench does not know.
    """
    ranges = pd.DataFrame.from_records(events[is_range(events)])[["name", "start_ns", "end_ns"]]
    own = ranges[ranges.name.str.startswith(PHASE)]
    pieces, inferred = own.assign(phase=own.name.str.removeprefix(PHASE)), list[pd.DataFrame]()
    if unknown := set(pieces.phase).difference(PHASES):
        raise UsageError(f"the trace has a phase {min(unknown)[:40]!r}, which is none of {', '.join(PHASES)}")
    is_own = len(own) > 0
    marks = ranges[ranges.name.str.match(STEP if is_own else r"ProfilerStep#\d+$")].sort_values(["start_ns", "end_ns"])
    if marks.empty:
        # From the end of one update to the end of the next, of the optimizer that has most.
        updates = ranges[ranges.name.str.startswith("Optimizer.step#")]
        updates = updates[updates.name == next(iter(updates.name.mode()), "")].sort_values("end_ns")
        marks = updates.assign(start_ns=updates.end_ns.shift())[1:]
    steps = len(marks)
    if is_own:
        # Each step has a phase or more.
        count = recorded_steps if recorded_steps is not None and 0 < recorded_steps <= len(own) else 0
        if 0 < count < steps:
            # The last began and did not end: its kernels are outside, and no mean counts it.
            pieces = pieces[pieces.start_ns < marks.start_ns.iat[count]]
        steps, marks = min(steps, count or steps) or count, marks[: count or None]
    else:
        pieces = ranges.assign(phase=[*map(_foreign_phase, ranges.name)])
        users = ranges.assign(phase=[*map(_users_phase, ranges.name)])
        inferred = _inferred(host, set(pieces.phase))
        models = pd.DataFrame.from_records(host.events[host.is_model])[ranges.columns].assign(phase="forward")
        # Whether a user's range holds all of the phase it does not say.
        pieces = pd.concat([pieces, users, models])
        pieces = pieces[pieces.phase != ""]
    told, pieces = set(pieces.phase), pd.concat([pieces, *inferred])
    source = "lmbench" if is_own else "foreign" if len(pieces) else "none"
    # A range without a length has no time.
    pieces = pieces[pieces.end_ns > pieces.start_ns]
    start, end, owner = paint(pieces.start_ns.to_numpy(np.int64), pieces.end_ns.to_numpy(np.int64))
    return PhaseTimeline(
        start,
        end,
        pieces.phase.iloc[owner].tolist(),
        source,
        max(steps, 1),
        steps > 0,
        marks[["start_ns", "end_ns"]].to_numpy(np.int64),
        marks.name.tolist(),
        tuple(phase for phase in PHASES if phase in {*pieces.phase} - told),
    )


def _inferred(host: Host, known: set[str]) -> list[pd.DataFrame]:
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
    inferred = []
    if "forward" not in known:
        is_forward = np.isin(np.arange(len(top)), top[[*host.forward.values()]]) & ~is_engine
        inferred.append(_hulls(events, is_forward, is_engine, "forward"))
    if "backward" not in known:
        # Where operators are noted for a backward pass, outside of one, models run.
        noted = events.thread[(events.sequence != NONE) & is_other]
        is_models = events.thread == (np.bincount(noted).argmax() if len(noted) else NONE)
        is_between = np.isin(np.arange(len(top)), top[is_models & is_other])
        inferred.append(_hulls(events, is_engine, is_between, "backward"))
    return inferred


def _hulls(events: Events, is_member: Flags, is_other: Flags, phase: Phase) -> pd.DataFrame:
    """From the first to the last of every row of members that none of the others interrupts."""
    rows = pd.DataFrame({"start_ns": events.start_ns, "end_ns": events.end_ns, "is_in": is_member})
    rows = rows[is_member | is_other].sort_values(["start_ns", "end_ns", "is_in"])
    hulls = rows[rows.is_in].groupby((~rows.is_in).cumsum())
    return hulls.agg(start_ns=("start_ns", "first"), end_ns=("end_ns", "max")).assign(phase=phase)
