"""One graph of the traced steps on all ranks: what every moment of host and device waits for, measured and simulated.

A moment is the start or end of a call of the host or of a kernel. A link says that one moment comes at least some time
after another. A moment comes when its last link allows it: this link is its binding one. The chain of binding links,
walked back from the end, is the critical path. The same graph with other times on its links is simulated for what-ifs
(Zhu et al., Daydream, USENIX ATC 2020; Hu et al., dPRO, MLSys 2022).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from lmbench.kernels.events import each, take, where
from lmbench.kernels.names import NAMES, reader
from lmbench.kernels.trace import Trace
from lmbench.records.intervals import NONE, Integers

#: What a link is: the host between two calls (`program`) and in one (`call`); from a launch to its kernel; from a
#: kernel to the next of its stream (`order`) or of another one (`wait`); a kernel or collective itself; from a kernel
#: to the call that waits for it (`return`) or for room in the launch queue (`queue`); from a rank's arrival at a
#: collective (`join`); and to the end of the steps.
LinkKind = Literal["program", "call", "launch", "order", "wait", "kernel", "return", "queue", "join", "end"]
HOST_LINKS: Final[tuple[LinkKind, ...]] = ("program", "call")
#: Links into a kernel's start, and those that a kernel owns.
START_LINKS: Final[tuple[LinkKind, ...]] = ("launch", "order", "wait")
KERNEL_LINKS: Final[tuple[LinkKind, ...]] = (*START_LINKS, "kernel")
# The profiler aligns the clocks of host and device to about a microsecond.
_TOLERANCE_NS = 1_000
# An idle device starts a kernel within twice the trace's median latency after its launch call returned. These are the
# limits of that time; a later kernel waits for something other than the host. An idle H200 started none of 24,000
# kernels later than 4.7 us; an MI300 takes 14 to 25 us.
_START_NS, _MAX_START_NS = 5_000, 50_000
# Longer latencies do not count in the median: such a kernel waited for something.
_LATENCY_NS = 100_000
#: The longest gap between two queued kernels; a longer pause has another reason. An H200 needs 1.1 us between kernels;
#: the longest seen, on H100, MI300 and older GPUs, is 17 us. Holistic Trace Analysis draws the line at the same 30 us
#: (`consecutive_kernel_delay=30`; its documentation says ns, its times are us).
KERNEL_GAP_NS = 30_000
# A kernel was surely queued if its launch call returned at least this long before the previous kernel ended. An idle
# device starts a kernel 2.3 us after the call returned (H200, CUDA 13; 5th to 95th percentile 1.9 to 2.6 us).
_QUEUED_LEAD_NS = 2_000
# The launch queue of CUDA holds about 1,000 kernels and then blocks the host (H200, torch 2.11). A launch behind this
# many kernels waited for room if it took this many times as long as others usually do.
_QUEUE_LENGTH, _SLOW_LAUNCH = 500, 2
# The simulation repeats the steps until two repetitions differ by at most this share, and no more often than this.
_STEADY_FRACTION, _MAX_LAPS = 1e-3, 8
_STREAM_WAIT = re.compile("StreamWaitEvent", re.IGNORECASE)
call_cause = reader(NAMES.calls)
#: The cause of waits, and of time on the path, in calls that wait for the device.
SYNCHRONIZING = "synchronizing"
# The time of a link that takes as long as it was measured to take.
_MEASURED = np.iinfo(np.int64).max // 2


@dataclass(frozen=True, eq=False)
class Solution:
    """The time of each moment in ns, and the index of its binding link or NONE, for repetitions of the steps in turn.

    The last repetition ends with the moment `end` and is `length_ns` long; the path over it begins at `start_ns`.
    """

    time_ns: npt.NDArray[np.float64]
    binding: Integers
    end: int
    length_ns: float

    @property
    def start_ns(self) -> float:
        return float(self.time_ns[self.end]) - self.length_ns


@dataclass(frozen=True, eq=False)
class Graph:
    """The graph of the traced steps of one or several ranks, on one clock.

    `moments` has a row for each moment, ordered by time: `time_ns`, `rank`, `begin_ns` of its rank's steps, and whether
    it `is_inside` the clocked steps, is the `is_end` of its rank, or the `is_join` of a collective.

    `links` has a row for each link, ordered by target: the moments `source` and `target`, the least time `ns` between
    them, the `kind`, the `rank`, and the `owner`, which is the index of its call in `calls[rank]` or of its kernel in
    the rank's trace. `is_binding` flags those that their targets waited for, and `unexplained_ns` is the part of their
    time that nothing in the trace accounts for. The simulation goes from `from_moment`, of the repetition before if
    `is_lapped`; it is NONE where a moment of the next repetition is not known.

    `steps` is the number of clocked steps.
    """

    traces: Mapping[int, Trace]
    calls: Mapping[int, pd.DataFrame]
    moments: pd.DataFrame
    links: pd.DataFrame
    steps: int

    @cached_property
    def measured(self) -> Solution:
        """The steps as they were recorded, once."""
        time_ns, binding = self.moments.time_ns.to_numpy(np.float64), np.full(len(self.moments), NONE)
        is_binding = self.links.is_binding.to_numpy()
        binding[self.links.target[is_binding]] = np.flatnonzero(is_binding)
        end = int(self.moments.time_ns[self.moments.is_end].idxmax())
        return Solution(time_ns, binding, end, float(time_ns[end] - self.moments.begin_ns[end]))

    @cached_property
    def starts(self) -> pd.DataFrame:
        """For each `rank` and kernel, `owner`, the `kind` of link that the start waited for, and `unexplained_ns`."""
        starts = self.links[self.links.is_binding & self.links.kind.isin(START_LINKS)]
        return starts.set_index(["rank", "owner"])[["kind", "unexplained_ns"]]

    @cached_property
    def _repeated(self) -> tuple[Integers, list[int], list[tuple[int, int, int]]]:
        """The links that repeat, by target; their sources, of which those of the repetition before come first; and
        each target with the first of its links and the one past the last."""
        rows = np.flatnonzero((self.links.from_moment != NONE) & self.moments.is_inside.to_numpy()[self.links.target])
        links = self.links.iloc[rows]
        sources = links.from_moment + np.where(links.is_lapped, 0, len(self.moments))
        targets, firsts = np.unique(links.target, return_index=True)
        spans = zip(targets.tolist(), firsts.tolist(), [*firsts[1:].tolist(), len(links)], strict=True)
        return rows, sources.tolist(), [*spans]

    def simulate(self, ns: npt.NDArray[np.float64] | None = None, without_stragglers: bool = False) -> Solution:
        """The steps with other times on the links, repeated until their length is steady.

        Args:
            ns: the time of each link; by default that of the trace.
            without_stragglers: a collective begins when half of the ranks have come, rather than all of them.
        """
        number, (rows, sources, spans) = len(self.moments), self._repeated
        weights = (self.links.ns.to_numpy(np.float64) if ns is None else ns)[rows].tolist()
        joins = set(np.flatnonzero(self.moments.is_join)) if without_stragglers else set()
        ends = np.flatnonzero(self.moments.is_end)
        times, bindings, ends_ns = [[0.0] * number], [], [0.0]
        while len(times) <= _MAX_LAPS:
            time, binding = times[-1] + [ends_ns[-1]] * number, [NONE] * number
            for target, first, past in spans:
                link, moment = first, time[sources[first]] + weights[first]
                if target in joins:
                    link = sorted(range(first, past), key=lambda link: time[sources[link]])[(past - first - 1) // 2]
                    moment = time[sources[link]] + weights[link]
                elif past > first + 1:
                    for other in range(first + 1, past):
                        if (later := time[sources[other]] + weights[other]) > moment:
                            moment, link = later, other
                time[number + target], binding[target] = moment, link
            times.append(time[number:])
            bindings.append(take(rows, np.array(binding), NONE))
            order = ends[np.argsort(np.array(times[-1])[ends], kind="stable")]
            end = int(order[(len(ends) - 1) // 2 if without_stragglers else -1])
            ends_ns.append(times[-1][end])
            lengths = np.diff(ends_ns[1:])
            if len(lengths) > 1 and abs(lengths[-1] - lengths[-2]) <= _STEADY_FRACTION * lengths[-1]:
                break
        last = (len(bindings) - 1) * number
        return Solution(np.concatenate(times[1:]), np.concatenate(bindings), last + end, ends_ns[-1] - ends_ns[-2])

    def path(self, solution: Solution) -> pd.DataFrame:
        """The critical path, from its end back: each `link` with `start_ns` and `end_ns`, which tile the steps."""
        number = len(self.moments)
        is_measured = len(solution.time_ns) == number
        sources = self.links["source" if is_measured else "from_moment"].tolist()
        laps = [0] * len(sources) if is_measured else self.links.is_lapped.astype(int).tolist()
        begins_ns, time_ns, binding = (
            self.moments.begin_ns.tolist(),
            solution.time_ns.tolist(),
            solution.binding.tolist(),
        )
        rows, moment, begin_ns = [], solution.end, solution.start_ns
        while (end_ns := time_ns[moment]) > begin_ns and (link := binding[moment]) != NONE:
            moment = sources[link] + number * (moment // number - laps[link])
            if is_measured:
                begin_ns = begins_ns[moment]
            rows.append((link, max(time_ns[moment], begin_ns) if moment >= 0 else begin_ns, end_ns))
        path = pd.DataFrame(rows, columns=["link", "start_ns", "end_ns"])
        return path.astype({"link": np.int64, "start_ns": float, "end_ns": float})


def build_graph(traces: Mapping[int, Trace], matches: pd.DataFrame | None = None) -> Graph:
    """The graph of the traces of one or several ranks.

    Args:
        traces: by rank; those of several ranks are on one clock, as `match_collectives` returns them.
        matches: the collectives of several ranks, as `match_collectives` returns them.
    """
    parts, number = {}, 0
    for rank, trace in traces.items():
        parts[rank] = _RankGraph(trace, number)
        number += parts[rank].number
    moments = pd.concat([part.moments.assign(rank=rank) for rank, part in parts.items()], ignore_index=True)
    links = pd.concat([part.links.assign(rank=rank) for rank, part in parts.items()], ignore_index=True)
    if matches is not None and len(matches):
        moments, links = _joined(moments, links, matches, parts)
    # A moment stands behind all that it is linked to: of moments at one time, those of earlier owners come first.
    order = np.lexsort((moments.stage, moments.owner_ns, moments.time_ns))
    place = np.argsort(order)
    moments = moments.iloc[order].reset_index(drop=True)
    moments["next"] = take(place, moments.next.to_numpy(), NONE)
    links = links.assign(source=place[links.source], target=place[links.target])
    timeline = next(iter(traces.values())).timeline
    calls = {rank: part.calls for rank, part in parts.items()}
    return Graph(traces, calls, moments, _settled(moments, links), timeline.steps - timeline.skipped)


def _settled(moments: pd.DataFrame, links: pd.DataFrame) -> pd.DataFrame:
    """The links with the times for which moments come when they were recorded, and with their sources when repeated."""
    is_ordered = links.is_lapped | (links.source < links.target)
    links = links[is_ordered].sort_values(["target", "source"], kind="stable", ignore_index=True)
    time_ns, is_inside = moments.time_ns.to_numpy(), moments.is_inside.to_numpy()
    source, is_lapped = links.source.to_numpy(), links.is_lapped.to_numpy()
    measured_ns = time_ns[links.target] - time_ns[source]
    ns = np.where(is_lapped, links.ns, np.minimum(links.ns, measured_ns))
    reach_ns = pd.Series(np.where(is_lapped, -_MEASURED, time_ns[source] + ns))
    is_binding = np.isin(links.index, reach_ns.groupby(links.target).idxmax()) & ~is_lapped
    return links.assign(
        ns=np.where(is_binding, measured_ns, ns),
        is_binding=is_binding,
        unexplained_ns=np.where(is_binding, np.minimum(links.unexplained_ns, measured_ns), 0),
        # The host's marks close its circle, and a launch queue that was full before the steps is not known again.
        from_moment=np.where(
            is_lapped | is_inside[source],
            source,
            np.where(links.kind.isin(("program", "queue")), NONE, moments.next.to_numpy()[source]),
        ),
        is_lapped=is_lapped | ~is_inside[source],
    )


def _joined(
    moments: pd.DataFrame, links: pd.DataFrame, matches: pd.DataFrame, parts: Mapping[int, _RankGraph]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The graph in which a collective runs once its last rank has come, and each rank's kernel ends with it."""
    frames = []
    for rank, rows in matches.groupby("rank"):
        start, end = parts[rank].ends_of(rows.kernel.to_numpy())
        frames.append(rows.assign(start=start, end=end)[start != NONE])
    arrivals = pd.concat(frames, ignore_index=True)
    arrivals["time_ns"] = moments.time_ns.to_numpy()[arrivals.start]
    groups = arrivals.groupby("collective").time_ns
    # A kernel that ended before the last rank came did not wait for it.
    arrivals["last_ns"] = groups.transform("max")
    is_waiting = moments.time_ns.to_numpy()[arrivals.end] >= arrivals.last_ns
    arrivals = arrivals[is_waiting & (groups.transform("size") > 1)]
    join = len(moments) + arrivals.groupby("collective").ngroup().to_numpy()
    rows = (
        pd.DataFrame({"time_ns": arrivals.last_ns, "rank": arrivals["rank"]}).set_index(join).groupby(level=0).first()
    )
    rows = rows.assign(
        owner_ns=rows.time_ns, stage=1, is_inside=True, next=NONE, is_end=False, is_join=True, begin_ns=0
    )  # fmt: skip
    links = links[~((links.kind == "kernel") & links.source.isin(arrivals.start))]
    owned = arrivals[["rank"]].assign(owner=arrivals.kernel, ns=_MEASURED, is_lapped=False, unexplained_ns=0)
    joins = owned.assign(source=arrivals.start, target=join, kind="join", ns=0)
    costs = owned.assign(source=join, target=arrivals.end, kind="kernel")
    return pd.concat([moments, rows], ignore_index=True), pd.concat([links, joins, costs], ignore_index=True)


class _RankGraph:
    """The moments and links of one rank, numbered from `first`.

    `calls` are the host's calls that launch kernels or wait for them, in order, with two marks at the begin and end of
    the steps. Threads take turns, as PyTorch's main thread and autograd's do.
    """

    def __init__(self, trace: Trace, first: int) -> None:
        self._trace, (self._begin_ns, self._finish_ns) = trace, trace.clocked_ns
        is_clocked, kernels = trace.is_clocked, trace.kernels
        is_kept = is_clocked | (kernels.launch_ns < self._begin_ns)
        self._kernels, self._is_clocked = kernels[is_kept], is_clocked[is_kept].to_numpy()
        self._start_ns, self._end_ns = (self._kernels[name].to_numpy() for name in ("start_ns", "end_ns"))
        self._lane = self._kernels.groupby(["device", "stream"]).ngroup().to_numpy()
        self._launched = np.argsort(self._kernels.launch_ns.to_numpy(), kind="stable")
        self.calls = self._host_calls()
        self._call_start, self._call_end = first, first + len(self.calls)
        self._start = self._call_end + len(self.calls)
        self._end = self._start + len(self._kernels)
        self._finish = self._end + len(self._kernels)
        self.number = self._finish + 1 - first
        self._rows = list[pd.DataFrame]()
        self._link_returns()
        self._link_host()
        self._link_kernels()
        links = pd.concat(self._rows, ignore_index=True)
        is_kernels = links.kind.isin(KERNEL_LINKS).to_numpy()
        owners = take(self._kernels.index, np.where(is_kernels, links.owner, NONE), links.owner.to_numpy())
        self.links = links.assign(owner=owners)
        self.moments = self._moments()

    def ends_of(self, kernels: Integers) -> tuple[Integers, Integers]:
        """The moments at which kernels of the trace start and end; NONE for kernels that the graph leaves out."""
        place = self._kernels.index.get_indexer(kernels)
        return np.where(place < 0, NONE, self._start + place), np.where(place < 0, NONE, self._end + place)

    def _host_calls(self) -> pd.DataFrame:
        columns = ["name", "thread", "start_ns", "end_ns"]
        launches = pd.DataFrame.from_records(self._trace.events.launches)[columns]
        launches = launches.loc[np.unique(self._kernels.launch[self._kernels.launch != NONE])]
        calls = pd.DataFrame.from_records(self._trace.events.calls)[columns]
        calls = calls[(each(calls.name, call_cause) == SYNCHRONIZING) & calls.thread.isin(launches.thread)]
        begin, end = (
            pd.DataFrame({"name": "", "thread": self._trace.events.main_thread, "start_ns": [at], "end_ns": [at]})
            for at in (self._begin_ns, self._finish_ns)
        )
        rows = pd.concat([begin, launches.assign(launch=launches.index), calls.assign(is_sync=True), end])
        rows = rows[rows.start_ns <= self._finish_ns].fillna({"launch": NONE, "is_sync": False})
        return rows.astype({"launch": np.int64, "is_sync": bool}).sort_values(
            "start_ns", kind="stable", ignore_index=True
        )

    def _moments(self) -> pd.DataFrame:
        """Rows as `Graph` describes them; what orders them, and the `next` that replaces one when steps repeat."""
        call_ns, last = self.calls.start_ns.to_numpy(), np.full(self._lane.max(initial=NONE) + 1, NONE)
        begin = np.flatnonzero(self.calls.name == "")[0]
        # A kernel before the steps is replaced by the last one of its stream in the repetition before.
        clocked = np.flatnonzero(self._is_clocked)
        last[self._lane[clocked]] = clocked + self._end
        finish_ns = self._end_ns[self._is_clocked].max(initial=self._finish_ns)
        rows = [
            (call_ns, call_ns, 0, self.calls.index >= begin, NONE),
            (self.calls.end_ns, call_ns, 2, self.calls.index >= begin, NONE),
            (self._start_ns, self._start_ns, 0, self._is_clocked, NONE),
            (self._end_ns, self._start_ns, 2, self._is_clocked, last[self._lane]),
            ([finish_ns], [finish_ns], 3, True, NONE),
        ]
        names = ("time_ns", "owner_ns", "stage", "is_inside", "next")
        frame = pd.concat([pd.DataFrame(dict(zip(names, row, strict=True))) for row in rows], ignore_index=True)
        shift_ns = self._trace.shift_ns
        times = {name: frame[name] + shift_ns for name in names[:2]}
        begin_ns = self._end_ns[~self._is_clocked].max(initial=self._begin_ns) + shift_ns
        return frame.assign(**times, is_end=frame.stage == 3, is_join=False, begin_ns=begin_ns)

    def _add(
        self, kind: LinkKind, source: Any, target: Any, owner: Any, ns: Any = _MEASURED, unexplained_ns: Any = 0,
        is_lapped: bool = False,
    ) -> None:  # fmt: skip
        columns = {"source": source, "target": target, "owner": owner, "ns": ns, "unexplained_ns": unexplained_ns}
        self._rows.append(pd.DataFrame({**columns, "kind": kind, "is_lapped": is_lapped}))

    def _link_host(self) -> None:
        """Link each call to the one before it: to its end, or to its start where both ran at once."""
        position = np.arange(len(self.calls))
        start_ns, end_ns = self.calls.start_ns.to_numpy(), self.calls.end_ns.to_numpy()
        source = position[:-1] + np.where(end_ns[:-1] <= start_ns[1:], self._call_end, self._call_start)
        self._add("program", source, position[1:] + self._call_start, position[1:])
        begin, end = np.flatnonzero(self.calls.name == "")
        self._add("program", [self._call_end + end], [self._call_start + begin], [begin], 0, is_lapped=True)
        self._add("end", [self._call_end + end], [self._finish], [end], 0)

    def _link_kernels(self) -> None:
        """Link each kernel's start to its launch, the kernel before it on its stream, and those that it waits for."""
        kernels, position = self._kernels, np.arange(len(self._kernels))
        start_ns, end_ns, lane = self._start_ns, self._end_ns, self._lane
        launch_ns, returned_ns = kernels.launch_ns.to_numpy(), kernels.returned_ns.to_numpy()
        is_linked = (kernels.launch != NONE).to_numpy()
        # The median is over launches to an idle device. The first kernel never counts: what ran before it is not known.
        before_ns = np.maximum.accumulate(np.append(start_ns[:1], end_ns))[:-1]
        is_idle = is_linked & ~kernels.duplicated("launch") & (returned_ns > before_ns)
        latency_ns = _median((start_ns - returned_ns)[is_idle], _LATENCY_NS, _START_NS // 2)
        reach_ns = np.where(is_linked, returned_ns + np.clip(2 * latency_ns, _START_NS, _MAX_START_NS), 0)
        by_lane = np.argsort(lane, kind="stable")
        is_same = lane[by_lane[:-1]] == lane[by_lane[1:]]
        before, after = by_lane[:-1][is_same], by_lane[1:][is_same]
        is_queued = returned_ns[after] + _QUEUED_LEAD_NS <= end_ns[before]
        gap_ns = _median((start_ns[after] - end_ns[before])[is_queued], KERNEL_GAP_NS, _TOLERANCE_NS)
        source, target = self._stream_waits()
        # When each kernel could have begun at the latest, if its stream and the streams that it waits for were done.
        free_ns = np.zeros_like(reach_ns)
        free_ns[after] = end_ns[before]
        np.maximum.at(free_ns, target, end_ns[source])
        reach_ns = np.maximum(reach_ns, np.where(start_ns - free_ns <= KERNEL_GAP_NS, start_ns, free_ns))
        # A kernel that nothing explains, and that began when one of another stream ended, waited for that one.
        ended = np.argsort(end_ns, kind="stable")
        last = np.searchsorted(end_ns[ended], start_ns, side="right") - 1
        last = ended[np.maximum(last, 0)]
        is_waiting = (start_ns > reach_ns) & (lane[last] != lane) & (end_ns[last] <= start_ns)
        is_waiting &= end_ns[last] >= start_ns - KERNEL_GAP_NS
        source, target = np.append(source, last[is_waiting]), np.append(target, position[is_waiting])
        unexplained_ns = np.where(is_waiting, 0, np.maximum(start_ns - reach_ns, 0))
        call = pd.Series(self.calls.index, self.calls.launch)[kernels.launch[is_linked]].to_numpy()
        linked = position[is_linked]
        least_ns = np.minimum(returned_ns - launch_ns, _MAX_START_NS) + latency_ns
        self._add(
            "launch", self._call_start + call, self._start + linked, linked, least_ns[linked], unexplained_ns[linked]
        )
        self._add("order", self._end + before, self._start + after, after, gap_ns, unexplained_ns[after])
        self._add("wait", self._end + source, self._start + target, target, gap_ns, unexplained_ns[target])
        self._add("kernel", self._start + position, self._end + position, position)
        clocked = by_lane[self._is_clocked[by_lane]]
        first, last = (
            clocked[~pd.Series(lane[clocked]).duplicated(keep=keep).to_numpy()] for keep in ("first", "last")
        )
        self._add("order", self._end + last, self._start + first, first, gap_ns, is_lapped=True)
        self._add("end", self._end + last, self._finish, last, 0)

    def _stream_waits(self) -> tuple[Integers, Integers]:
        """Kernels, and later ones of other streams that wait for them.

        CUPTI tells neither the streams nor the events of `cudaStreamWaitEvent`. So the first kernel launched after such
        a call waits for the last ones of all other streams, if they ended before it began.
        """
        calls = self._trace.events.calls
        waits_ns = calls.start_ns[where(calls.name, _STREAM_WAIT.search) & np.isin(calls.thread, self.calls.thread)]
        kernels, lane = self._kernels.iloc[self._launched], self._lane[self._launched]
        waits = np.searchsorted(waits_ns, kernels.launch_ns.to_numpy())
        targets = np.flatnonzero((np.diff(waits, prepend=0) > 0) & (kernels.launch != NONE))
        pairs = [np.zeros((2, 0), dtype=np.int64)]
        for other in np.unique(lane):
            members = np.flatnonzero(lane == other)
            last = np.searchsorted(members, targets) - 1
            is_known = (last >= 0) & (lane[targets] != other)
            pairs.append(self._launched[np.stack((members[last[is_known]], targets[is_known]))])
        source, target = np.concatenate(pairs, axis=1)
        is_over = self._end_ns[source] <= self._start_ns[target]
        return source[is_over], target[is_over]

    def _link_returns(self) -> None:
        """Link calls to the kernels that they wait for: synchronizes, copies to the host, launches to a full queue."""
        calls, kernels = self.calls, self._kernels
        position, start_ns, end_ns = np.arange(len(calls)), calls.start_ns.to_numpy(), calls.end_ns.to_numpy()
        least_ns = np.full(len(calls), _MEASURED)
        if kernels.empty:
            self._add("call", self._call_start + position, self._call_end + position, position)
            return
        launch_ns = kernels.launch_ns.to_numpy()
        ended, launched = np.argsort(self._end_ns, kind="stable"), launch_ns[self._launched]
        ended_ns = self._end_ns[ended]
        # The kernel that ended last before each call returned.
        last = ended[np.maximum(np.searchsorted(ended_ns, end_ns + _TOLERANCE_NS, side="right") - 1, 0)]
        is_held = (self._end_ns[last] > start_ns) & (launch_ns[last] < end_ns)
        is_launch, is_waiting = (calls.launch != NONE).to_numpy(), calls.is_sync.to_numpy(copy=True)
        call = pd.Series(position[is_launch], calls.launch[is_launch])
        is_copied = (kernels.category == "gpu_memcpy") & (kernels.end_ns <= kernels.returned_ns)
        copies = np.flatnonzero(is_copied & (kernels.launch != NONE))
        copying = call[kernels.launch.iloc[copies]].to_numpy()
        last[copying], is_held[copying], is_waiting[copying] = copies, True, True
        depth = np.searchsorted(launched, start_ns) - np.searchsorted(ended_ns, start_ns)
        duration_ns = end_ns - start_ns
        usual_ns = _median(duration_ns[is_launch & (depth < _QUEUE_LENGTH)], _LATENCY_NS, _START_NS)
        is_full = is_launch & is_held & ~is_waiting & (duration_ns > _SLOW_LAUNCH * usual_ns) & (depth >= _QUEUE_LENGTH)
        # A synchronize with nothing to wait for comes after the last kernel that was launched before it.
        newest = self._launched[np.maximum(np.searchsorted(launched, start_ns) - 1, 0)]
        is_idle = is_waiting & ~is_held & (launch_ns[newest] < start_ns) & (self._end_ns[newest] <= end_ns)
        least_ns[is_waiting & is_held] = 0
        least_ns[is_full] = usual_ns
        held, idle, full = (np.flatnonzero(is_kind) for is_kind in (is_waiting & is_held, is_idle, is_full))
        self._add("return", self._end + last[held], self._call_end + held, held)
        self._add("return", self._end + newest[idle], self._call_end + idle, idle, 0)
        self._add("queue", self._end + last[full], self._call_end + full, full)
        self._add("call", self._call_start + position, self._call_end + position, position, least_ns)
        # The profiler aligns the clocks only so far: no call returns before the kernel that it waits for has ended.
        is_held &= is_waiting | is_full
        self.calls["end_ns"] = np.where(is_held, np.maximum(end_ns, self._end_ns[last] + 1), end_ns)


def _median(times_ns: Integers, limit_ns: int, default: int) -> int:
    """The median of the times between 0 and a limit; the default without such times."""
    times_ns = times_ns[(times_ns >= 0) & (times_ns <= limit_ns)]
    return int(np.median(times_ns)) if len(times_ns) else default
