"""A trace, read and attributed: every kernel with its launch, phase, kind and part, from which all else is computed.

When each phase ran is told by the ranges on the host, lmbench's own, Lightning's, PyTorch's or the user's, or by what
autograd runs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pandas as pd

from lmbench.errors import UsageError
from lmbench.kernels.compiled import parts_in_graphs, read_graphs
from lmbench.kernels.events import Events, TraceEvents, is_range, read_trace
from lmbench.kernels.host import Host, settled
from lmbench.kernels.names import NAMES, UNCLASSIFIED, kind_of, reader
from lmbench.kernels.recording import TRACE_FILE, TraceNotes
from lmbench.records.intervals import NONE, Flags, Integers, locate, paint
from lmbench.records.load import Run, is_run_folder, load_run
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.store import RUN_FILE
from lmbench.records.vocabulary import DAMAGED, PHASE, PHASES, STEP, Phase

#: A phase, or where a kernel lies whose launch is in none, or that has no launch in the trace.
TracePhase = Literal[Phase, "outside", "unlinked"]
OUTSIDE: Final = "outside"
UNLINKED: Final = "unlinked"
#: What is no part of a step.
NO_PHASE: Final[tuple[TracePhase, ...]] = (OUTSIDE, UNLINKED)
#: The order of phases in tables.
PHASE_ORDER: tuple[TracePhase, ...] = (*PHASES, *NO_PHASE)

_foreign_phase, _users_phase = reader("foreign_phases"), reader("users_phases")
#: A message from one rank to one other.
POINT_TO_POINT = "point-to-point"
_collective_of = reader("collectives")


@dataclass(frozen=True)
class PhaseTimeline:
    """Pieces of time beside each other, each of one phase.

    `source` says whose ranges they are: `lmbench`, `foreign` or `none`. `step_ns` has a row with start and end for
    each whole step, in order, none where nothing tells; `step_names` are the names of their ranges, which without a
    range for each step are those of the optimizer that ends it. `inferred` are phases that no
    range tells, only what autograd runs.
    """

    start_ns: Integers
    end_ns: Integers
    phases: list[str]
    source: str
    step_ns: Integers
    step_names: list[str]
    inferred: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Whole steps in the trace, 1 where nothing tells."""
        return max(len(self.step_ns), 1)

    @property
    def skipped(self) -> int:
        """Steps that no clock counts: of several of lmbench's the first, since the recording starts on an idle device,
        where the host first has to get ahead."""
        return int(self.source == "lmbench" and len(self.step_ns) > 1)

    def at(self, moments: Integers) -> list[str]:
        """The phase of each moment."""
        # NONE reads what stands behind the last.
        named = [*self.phases, OUTSIDE]
        return [named[index] for index in locate(self.start_ns, self.end_ns, moments)]


@dataclass(frozen=True)
class Trace:
    """All that is known of a trace; `run` is None for a bare trace file.

    `kernels` has a row for each kernel, copy and fill, by start, with the columns of an event and `duration_ns`,
    `launch`, `phase`, `kind`, `part` and `is_counted`. `launch` is an index into the launches, NONE where the trace has
    none: in which phase the host started that kernel is then unknown, and its phase is `unlinked`. The launch is from
    `launch_ns` to `returned_ns` on `thread`; for a kernel without one its own start and the main thread stand there.
    `around` is the innermost operator or module range then, NONE where there is none. `is_counted` are those that the
    traced steps launched; what was queued before the trace began is not theirs.
    """

    path: Path
    run: Run | None
    events: TraceEvents
    host: Host
    timeline: PhaseTimeline
    kernels: pd.DataFrame

    @property
    def record(self) -> RunRecord:
        """The run's record; every field None where the trace has no run, or one that cannot be read."""
        return self.run.record if self.run else RunRecord(SCHEMA_VERSION, DAMAGED)


def load_trace(path: str | Path) -> Trace:
    """Read a run's folder or a trace file and find phase, kind and part of every kernel.

    Raises UsageError, in one line, for whatever is no such trace.
    """
    file = Path(path)
    file = file.parent if file.name == RUN_FILE else file
    file = file / TRACE_FILE if os.path.isdir(file) else file  # noqa: PTH112 (which raises on some paths)
    is_result = file.name == TRACE_FILE and is_run_folder(file.parent)
    run = load_run(file.parent) if is_result else None
    events, notes = read_trace(file, follows_links=not is_result)
    host = Host(events.host, notes.module_classes)
    timeline = find_phases(events.host, host, notes.steps)
    return Trace(file, run, events, host, timeline, _attributed(events, host, timeline, notes))


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
    if marks.empty and not is_own:
        # From the end of one update to the end of the next, of the optimizer that has most.
        updates = ranges[ranges.name.str.startswith("Optimizer.step#")]
        updates = updates[updates.name == next(iter(updates.name.mode()), "")].sort_values("end_ns")
        marks = updates.assign(start_ns=updates.end_ns.shift())[1:]
    if is_own and recorded_steps is not None and 0 < recorded_steps < len(marks):
        # The last began and did not end: its kernels are outside, and no mean counts it.
        pieces, marks = pieces[pieces.start_ns < marks.start_ns.iat[recorded_steps]], marks[:recorded_steps]
    if not is_own:
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


def match_launches(kernels: pd.DataFrame, launches: Events) -> Integers:
    """For each kernel its launch, NONE where it has none: the last call with its correlation id before it, or else the
    first with it. A call that launches a CUDA graph has many kernels."""
    calls = pd.DataFrame.from_records(launches, columns=["correlation", "start_ns"]).assign(call=range(len(launches)))
    calls = calls[calls.correlation != NONE]
    last = pd.merge_asof(kernels[["correlation", "start_ns"]], calls, on="start_ns", by="correlation").call
    first = kernels.correlation.map(calls.drop_duplicates("correlation").set_index("correlation").call)
    return np.asarray(last.fillna(first).fillna(NONE), dtype=np.int64)


def _attributed(events: TraceEvents, host: Host, timeline: PhaseTimeline, notes: TraceNotes) -> pd.DataFrame:
    """The kernels with what their launches and the host's events tell of them."""
    kernels, launches = events.kernels, events.launches
    launch = match_launches(kernels, launches)
    is_linked = launch != NONE
    of_launch = {
        "launch_ns": (launches.start_ns, kernels.start_ns), "returned_ns": (launches.end_ns, kernels.start_ns),
        "thread": (launches.thread, events.main_thread),
    }  # fmt: skip
    # Behind the launches stands a nought for the kernels without one; NONE reads it.
    columns = {
        name: np.where(is_linked, np.append(values, 0)[launch], own) for name, (values, own) in of_launch.items()
    }
    launch_ns, around = columns["launch_ns"], host.nesting.around(columns["thread"], columns["launch_ns"])
    around = np.where(is_linked, around, NONE)
    is_counted = is_linked.copy()
    if len(timeline.step_ns):
        is_counted &= (launch_ns >= timeline.step_ns[0, 0]) & (launch_ns < timeline.step_ns[:, 1].max())
    # Correlation ids rise with the calls; a kernel with a later one has lost its launch.
    first_id = min(launches.correlation[launches.correlation != NONE], default=0)
    is_counted |= ~is_linked & ~kernels.correlation.between(0, first_id - 1)
    operators = np.append(host.events.name, "")[around]
    kernels = kernels.assign(
        **columns,
        launch=launch,
        around=around,
        phase=np.where(is_linked, timeline.at(launch_ns), UNLINKED),
        kind=[*map(kind_of, kernels.name, kernels.category, operators)],
        # Of a trace whose steps launched nothing everything counts.
        is_counted=is_counted | (not is_counted.any()),
    )
    in_graph = parts_in_graphs(kernels, host, read_graphs(notes.compiled_graphs, notes.module_classes))
    parts = [
        # What is done for the update, for the input or between ranks is so whatever the operator.
        ("comm" if kind == "comm" else NAMES["phase_parts"].get(phase))
        or in_graph.get(index)
        or host.part(event)
        # These kinds do a part of the model and nothing else.
        or (kind if kind in ("attention", "norm") else UNCLASSIFIED)
        for index, (event, phase, kind) in enumerate(zip(around.tolist(), kernels.phase, kernels.kind, strict=True))
    ]
    return _described(kernels.assign(part=parts), host, timeline)


def _described(kernels: pd.DataFrame, host: Host, timeline: PhaseTimeline) -> pd.DataFrame:
    """The kernels with what they do for communication, blank or missing for those of another kind than `comm`.

    `collective` is its kind. `message_bytes` and `bus_bytes` are what algorithm and bus bandwidth are of, as nccl-tests
    define them (NVIDIA/nccl-tests:doc/PERFORMANCE.md): the larger of what a rank sends and receives, and that times
    2(n-1)/n for all-reduce, (n-1)/n for reduce-scatter, all-gather and all-to-all between n ranks. `group` and `stage`
    say between whom and when: the collective's number, or else the step that launched it. `messages` are those of a
    point-to-point kernel, `0>1` from rank 0 to 1 with None for the trace's own; what is noted on the thread since its
    communication before is launched together. `cost_ns` is what it takes once the last rank has come, the kernel's
    duration as far as one trace tells.
    """
    rows, comm, (begin_ns, end_ns) = {}, kernels[kernels.kind == "comm"], timeline.step_ns.T
    noted_by_host = pd.DataFrame.from_records(host.events[host.events.name == "record_param_comms"])
    launches = comm.reset_index().sort_values("launch_ns")
    before_launch = pd.merge_asof(
        noted_by_host.sort_values("start_ns"), launches, left_on="start_ns", right_on="launch_ns", by="thread",
        direction="forward",
    ).groupby("index").arguments_x.agg(list)  # fmt: skip

    def elements(noted: Any) -> int:
        return max((number for number in (noted.in_elements, noted.out_elements) if isinstance(number, int)), default=0)

    for kernel in comm.itertuples():
        around = [*host.nesting.climb(kernel.around)]
        # Some profilers note the message on the operator alone.
        noted = [kernel.arguments, *(host.events.arguments[event] for event in around)]
        source: Any = next((arguments for arguments in noted if arguments.collective_name), noted[0])
        names = [str(source.collective_name), *(host.names[event] for event in around), kernel.name]
        kind = next(filter(None, map(_collective_of, names)), "unknown")
        together, messages = [source], set[str]()
        if kind == POINT_TO_POINT:
            together = [one for one in before_launch.get(kernel.Index, []) if one.source != one.target] or together
            messages = {f"{one.source}>{one.target}" for one in together}
        source, size = together[0], together[0].group_size
        most = max(sum(elements(one) for one in together if (one.target is None) == is_in) for is_in in (True, False))
        message_bytes = most * NAMES["element_bytes"].get(str(source.element_type), np.nan) or np.nan
        share = (size - 1) / size if isinstance(size, int) and size > 1 else np.nan
        bus_bytes = message_bytes * (NAMES["bus_factors"].get(kind, 0) * share or 1.0)
        # Each rank numbers messages by itself.
        number = NONE if messages else source.number
        (step,) = locate(begin_ns, end_ns, np.array([kernel.launch_ns]))
        stage = timeline.step_names[step] if number == NONE and step != NONE else f"number {number}"
        group = "" if messages else f"{source.group_name} {source.group_ranks}"
        rows[kernel.Index] = (kind, message_bytes, bus_bytes, group, stage, messages)
    columns = ["collective", "message_bytes", "bus_bytes", "group", "stage", "messages"]
    described = pd.DataFrame.from_dict(rows, orient="index", columns=columns).reindex(kernels.index)
    described = described.fillna({"collective": "", "group": "", "stage": ""})
    return pd.concat([kernels, described], axis=1).assign(cost_ns=kernels.duration_ns)
