"""A trace, read and attributed: every kernel with its launch, phase, kind and part. All results are computed from it.

Ranges on the host tell when each phase ran: lmbench's own, Lightning's, PyTorch's or the user's. Without ranges, the
operators that autograd runs tell forward and backward.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from lmbench.kernels.communication import describe_communication
from lmbench.kernels.compiled import parts_in_graphs, read_graphs
from lmbench.kernels.events import Events, TraceEvents, is_range, read_trace
from lmbench.kernels.host import HostEvents, settled
from lmbench.kernels.names import NAMES, UNCLASSIFIED, kind_of, reader
from lmbench.kernels.trace_notes import TRACE_FILE, TraceNotes
from lmbench.records.intervals import NONE, Flags, Integers, locate, paint, take
from lmbench.records.load import StoredRun, is_run_folder, load_run
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.store import RUN_FILE
from lmbench.records.vocabulary import DAMAGED, PHASE, PHASES, STEP, Phase

#: The phase of a kernel whose launch is in no phase of a step, and of one that has no launch in the trace.
OUTSIDE, UNLINKED = NO_PHASE = ("outside", "unlinked")
#: The order of phases in tables.
PHASE_ORDER = (*PHASES, *NO_PHASE)

# The rank in the name of a file or folder.
_RANK = re.compile(r"(?:rank|worker)[-_. ]?(\d+)", re.IGNORECASE)
_foreign_phase, _users_phase = reader("foreign_phases"), reader("users_phases")


@dataclass(frozen=True)
class PhaseTimeline:
    """The host's time as pieces that do not overlap, each of one phase. The last phase is that of all other time.

    `source` says whose ranges tell the phases: `lmbench`, `foreign` or `none`. `step_ns` has a row with start and end
    for each whole step, in order; it is empty if nothing tells the steps. `step_names` are the names of the steps'
    ranges, or those of the optimizer steps that end them. `inferred` are the phases that no range tells, only the
    operators that autograd runs.
    """

    start_ns: Integers
    end_ns: Integers
    phases: npt.NDArray[Any]
    source: str
    step_ns: Integers
    step_names: list[str]
    inferred: tuple[str, ...]

    @property
    def steps(self) -> int:
        """The number of whole steps in the trace; 1 if it is unknown."""
        return max(len(self.step_ns), 1)

    @property
    def skipped(self) -> int:
        """The number of first steps that clocks leave out: 1 of several steps that lmbench recorded, else 0.

        A recording starts on an idle device, so the host first has to get ahead.
        """
        return int(self.source == "lmbench" and len(self.step_ns) > 1)

    def at(self, moments: Integers) -> Any:
        """The phase of each moment, as an array."""
        return self.phases[locate(self.start_ns, self.end_ns, moments)]


@dataclass(frozen=True)
class Trace:
    """A trace with its attributed kernels; `run` is None for a bare trace file.

    On the common clock of several ranks its times are later by `shift_ns`.

    `kernels` has a row for each kernel, copy and fill, ordered by start. It has the columns of an event, `duration_ns`,
    `phase`, `kind`, `part`, those of `CommunicationKernel`, and:

    - `launch`: an index into the calls. A kernel whose launch is not in the trace has NONE and the phase `unlinked`:
      nothing tells in which phase the host started it.
    - `launch_ns`, `returned_ns`, `thread`: start, end and thread of the launch; without a launch, twice the kernel's
      start and the main thread.
    - `stream`: a number for its stream.
    - `around`: the index of the innermost operator or module range around the launch, or NONE.
    - `step`: the name of the step that launched it, empty outside of steps.
    - `is_counted`: whether the traced steps launched it, rather than being queued before the trace began.
    - `is_clocked`: whether it counts, and was launched in a step that is clocked, or began there without a launch.
    - `is_awaited`: whether it is a copy that ended before its call returned, so that the host waited for it.
    - `match`, `wait_ns`: the number of a collective that several ranks ran, and the time until the last rank came. One
      trace alone tells neither: missing, and 0.
    """

    path: Path
    run: StoredRun | None
    events: TraceEvents
    host: HostEvents
    timeline: PhaseTimeline
    kernels: pd.DataFrame
    shift_ns: int = 0

    @cached_property
    def clocked_ns(self) -> tuple[int, int]:
        """Start and end of the steps that are clocked.

        Without steps these are the start of the first kernel that counts and the end of the last one; without kernels
        those of the whole trace.
        """
        steps_ns = self.timeline.step_ns[self.timeline.skipped :]
        if not len(steps_ns):
            steps_ns = self.kernels.loc[self.kernels.is_counted, ["start_ns", "end_ns"]].to_numpy()
        return (int(steps_ns.min()), int(steps_ns.max())) if len(steps_ns) else self.span_ns

    @property
    def span_ns(self) -> tuple[int, int]:
        """Start of the first and end of the last step; of the whole trace, to the last event of the host, without."""
        steps_ns, host = self.timeline.step_ns, self.events.host
        if len(steps_ns):
            return int(steps_ns.min()), int(steps_ns.max())
        return 0, int(max(host.end_ns, default=0))

    @property
    def rank(self) -> int | None:
        """The rank by the trace itself, else by its run's record, else by the name of its file or folder."""
        by_name = _RANK.search(self.path.name) or _RANK.search(self.path.parent.name)
        ranks = (self.events.distributed.rank, self.record.rank, by_name and int(by_name[1]))
        return next((rank for rank in ranks if rank is not None), None)

    @property
    def record(self) -> RunRecord:
        """The run's record; an empty one, with the outcome DAMAGED, if there is no run or its record cannot be read."""
        return self.run.record if self.run else RunRecord(SCHEMA_VERSION, DAMAGED)


def load_trace(path: str | Path) -> Trace:
    """Read a run's folder or a trace file and attribute its kernels.

    Raises:
        UsageError: in one line, if there is no trace that can be read.
    """
    file = Path(path)
    file = file.parent if file.name == RUN_FILE else file
    file = file / TRACE_FILE if os.path.isdir(file) else file  # noqa: PTH112 (which raises on some paths)
    is_result = file.name == TRACE_FILE and is_run_folder(file.parent)
    run = load_run(file.parent) if is_result else None
    events, notes = read_trace(file, follows_links=not is_result)
    host = HostEvents(events.host, events.functions, notes.module_classes)
    timeline = find_phases(events.host, host, notes.steps)
    return Trace(file, run, events, host, timeline, _attribute(events, host, timeline, notes))


def find_phases(events: Events, host: HostEvents, recorded_steps: int | None) -> PhaseTimeline:
    """The phases and steps of a trace; `recorded_steps` is the number of whole steps in the trace's notes."""
    ranges = events.loc[is_range(events), ["name", "start_ns", "end_ns"]]
    pieces = ranges[ranges.name.isin([f"{PHASE}{phase}" for phase in PHASES])]
    pieces = pieces.assign(phase=pieces.name.str.removeprefix(PHASE))
    inferred = []
    is_lmbench = len(pieces) > 0
    steps = ranges[ranges.name.str.match(STEP if is_lmbench else r"ProfilerStep#\d+$")]
    steps = steps.sort_values(["start_ns", "end_ns"])
    if recorded_steps is not None and recorded_steps < len(steps):
        # The last step began and did not end: its kernels are outside, and no mean counts it.
        pieces = pieces[pieces.start_ns < steps.start_ns.iat[recorded_steps]]
        steps = steps[:recorded_steps]
    if not is_lmbench:
        if steps.empty:
            # A step lasts from the end of one update to the end of the next, by the optimizer with the most updates.
            updates = ranges[ranges.name.str.startswith("Optimizer.step#")]
            updates = updates[updates.name == next(iter(updates.name.mode()), "")].sort_values("end_ns")
            steps = updates.assign(start_ns=updates.end_ns.shift())[1:]
        pieces = ranges.assign(phase=[*map(_foreign_phase, ranges.name)])
        # A user's range may hold only some of its phase, so it does not keep that phase from being inferred.
        inferred = _infer_phases(host, set(pieces.phase))
        users = ranges.assign(phase=[*map(_users_phase, ranges.name)])
        models = host.events.loc[host.is_model, ranges.columns].assign(phase="forward")
        pieces = pd.concat([pieces, users, models])
        pieces = pieces[pieces.phase != ""]
    range_phases, pieces = set(pieces.phase), pd.concat([pieces, *inferred])
    source = "lmbench" if is_lmbench else "foreign" if len(pieces) else "none"
    # Empty ranges have no time.
    pieces = pieces[pieces.end_ns > pieces.start_ns]
    start, end, owner = paint(pieces.start_ns.to_numpy(np.int64), pieces.end_ns.to_numpy(np.int64))
    return PhaseTimeline(
        start,
        end,
        np.append(pieces.phase.iloc[owner], OUTSIDE),
        source,
        steps[["start_ns", "end_ns"]].to_numpy(np.int64),
        steps.name.tolist(),
        tuple(phase for phase in PHASES if phase in {*pieces.phase} - range_phases),
    )


def _infer_phases(host: HostEvents, range_phases: set[str]) -> list[pd.DataFrame]:
    """Pieces of forward and backward, unless they are in `range_phases`, by the operators that autograd runs.

    Backward has the operators that autograd's engine runs; forward has those that made the nodes of its graph. Forward
    operators that the engine runs again, of a checkpoint, are backward. A backward pass ends where the thread that runs
    models does something else: pipeline schedules run a forward pass between two backward passes.
    """
    events, is_engine, parent = host.events, host.is_engine, host.nesting.parent
    is_module = host.is_module
    # The outermost operator around each event, or the event itself.
    top = settled(np.where((parent != NONE) & ~is_module[parent], parent, np.arange(len(parent))))
    is_other = ~is_module & ~is_engine[top]
    inferred = []
    if "forward" not in range_phases:
        is_forward = np.isin(np.arange(len(top)), top[[*host.forward.values()]]) & ~is_engine
        inferred.append(_hulls(events, is_forward, is_engine, "forward"))
    if "backward" not in range_phases:
        # The thread that runs models has the most operators with a sequence number outside of the engine.
        threads = events.thread[(events.sequence != NONE) & is_other]
        runs_models = events.thread == next(iter(threads.mode()), NONE)
        is_between = np.isin(np.arange(len(top)), top[runs_models & is_other])
        inferred.append(_hulls(events, is_engine, is_between, "backward"))
    return inferred


def _hulls(events: Events, is_member: Flags, is_other: Flags, phase: Phase) -> pd.DataFrame:
    """A piece of the phase for each sequence of members that no other event interrupts, from its start to its end."""
    rows = pd.DataFrame({"start_ns": events.start_ns, "end_ns": events.end_ns, "is_in": is_member})
    rows = rows[is_member | is_other].sort_values(["start_ns", "end_ns", "is_in"])
    hulls = rows[rows.is_in].groupby((~rows.is_in).cumsum())
    return hulls.agg(start_ns=("start_ns", "first"), end_ns=("end_ns", "max")).assign(phase=phase)


def match_launches(kernels: pd.DataFrame, calls: Events) -> Integers:
    """The index of each kernel's launch, or NONE: the last call before it with its correlation id, else the first one.

    A call that launches a CUDA graph has many kernels.
    """
    is_launch = calls.is_launch & (calls.correlation != NONE)
    launches = calls.loc[is_launch, ["correlation", "start_ns"]].assign(call=calls.index[is_launch])
    last = pd.merge_asof(kernels[["correlation", "start_ns"]], launches, on="start_ns", by="correlation").call
    first = kernels.correlation.map(launches.drop_duplicates("correlation").set_index("correlation").call)
    return np.asarray(last.fillna(first).fillna(NONE), dtype=np.int64)


def _attribute(events: TraceEvents, host: HostEvents, timeline: PhaseTimeline, notes: TraceNotes) -> pd.DataFrame:
    """The kernels with the columns that `Trace` describes, from their launches and the host's events."""
    kernels, calls = events.kernels, events.calls
    launch = match_launches(kernels, calls)
    is_linked = launch != NONE
    start_ns = kernels.start_ns.to_numpy()
    launch_ns = take(calls.start_ns, launch, start_ns)
    thread = take(calls.thread, launch, events.main_thread)
    around = np.where(is_linked, host.nesting.around(thread, launch_ns), NONE)
    # Correlation ids rise with the calls, and a stream runs kernels in the order of their launches. So a kernel with a
    # lower id than all launches, or before its stream's first kernel with a launch, was launched before the trace
    # began. Any other kernel without a launch has lost it, and counts.
    first_id = min(calls.correlation[calls.is_launch & (calls.correlation != NONE)], default=0)
    first_ns = kernels.start_ns.where(is_linked).groupby([kernels.device, kernels.thread]).transform("min")
    is_counted = is_linked | ~(kernels.correlation.between(0, first_id - 1) | (kernels.start_ns < first_ns)).to_numpy()
    is_after_skipped = np.full(len(kernels), True)
    if len(timeline.step_ns):
        is_after_skipped = launch_ns >= timeline.step_ns[timeline.skipped, 0]
        # A kernel without a launch may be behind the last step, whose kernels outlast it.
        is_counted &= (launch_ns >= timeline.step_ns[0, 0]) & (~is_linked | (launch_ns < timeline.step_ns[:, 1].max()))
    # If the steps of a trace launched nothing, all kernels count.
    is_counted |= not is_counted.any()
    returned_ns = take(calls.end_ns, launch, start_ns)
    kernels = kernels.assign(
        stream=kernels.thread,
        launch=launch,
        launch_ns=launch_ns,
        returned_ns=returned_ns,
        thread=thread,
        around=around,
        step=take(timeline.step_names, locate(timeline.step_ns[:, 0], timeline.step_ns[:, 1], launch_ns), ""),
        phase=np.where(is_linked, timeline.at(launch_ns), UNLINKED),
        kind=[*map(kind_of, kernels.name, kernels.category, take(host.events.name, around, ""))],
        is_counted=is_counted,
        is_clocked=is_counted & is_after_skipped,
        is_awaited=is_linked & (kernels.category == "gpu_memcpy") & (kernels.end_ns <= returned_ns),
        match=np.nan,
        wait_ns=0,
    )
    in_graph = parts_in_graphs(kernels, host, read_graphs(notes.compiled_graphs, notes.module_classes))
    parts = [
        # Communication, and kernels of the update and the input, have their part whatever their operator.
        ("comm" if kind == "comm" else NAMES.phase_parts.get(phase))
        or in_graph.get(index)
        or host.part(event)
        # Kernels of these kinds work for no other part.
        or (kind if kind in ("attention", "norm") else UNCLASSIFIED)
        for index, (event, phase, kind) in enumerate(zip(around.tolist(), kernels.phase, kernels.kind, strict=True))
    ]
    return pd.concat([kernels.assign(part=parts), describe_communication(kernels, host)], axis=1)
