"""The activities of host and device in the traced steps, and the links that say what each waits for.

An activity is a call of the host or a kernel; a moment is its start or end. A link says that one moment comes at least
some time after another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from lmbench.kernels.events import where
from lmbench.kernels.names import reader
from lmbench.kernels.trace import Trace
from lmbench.records.intervals import NONE, Integers

#: The profiler aligns the clocks of host and device to about a microsecond.
TOLERANCE_NS = 1_000
# An idle device starts a kernel within twice the trace's median latency after its launch call returned. These are the
# limits of that time; a later kernel waits for something other than the host. An idle H200 started none of 24,000
# kernels later than 4.7 us; an MI300 takes 14 to 25 us.
_START_NS, _MAX_START_NS = 5_000, 50_000
# Longer latencies do not count in the median: such a kernel waited for something.
_LATENCY_NS = 100_000
#: The longest gap between two queued kernels; a longer pause has another reason. An H200 needs 1.1 us between kernels;
#: the longest seen, on H100, MI300 and older GPUs, is 17 us. Holistic Trace Analysis draws the line at the same 30 us
#: (`consecutive_kernel_delay=30`; its documentation says ns, its times are us).
KERNEL_GAP_NS: Final = 30_000
# A kernel was surely queued if its launch call returned at least this long before the previous kernel ended. An idle
# device starts a kernel 2.3 us after the call returned (H200, CUDA 13; 5th to 95th percentile 1.9 to 2.6 us).
_QUEUED_LEAD_NS = 2_000
# The launch queue of CUDA holds about 1,000 kernels and then blocks the host (H200, torch 2.11). A launch behind this
# many kernels waited for room if it took this many times as long as others usually do.
_QUEUE_LENGTH, _SLOW_LAUNCH = 500, 2
_STREAM_WAIT = re.compile("StreamWaitEvent", re.IGNORECASE)
# The time of a link that takes as long as it was measured to take.
_MEASURED = np.iinfo(np.int64).max // 2
#: The cause of time in calls that wait for the device.
SYNCHRONIZING: Final = "synchronizing"
call_cause = reader("calls")


def find_links(traces: Mapping[int, Trace]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The activities and links of the traces of one or several ranks, as `Graph` describes them.

    The traces are by rank; those of several ranks are on one clock, as `match_collectives` returns them.
    """
    parts, links = list[pd.DataFrame](), list[pd.DataFrame]()
    for rank, trace in traces.items():
        part = _RankGraph(trace, sum(map(len, parts)))
        parts.append(part.activities().assign(rank=rank))
        links += part.links
    activities, linked = _joined(pd.concat(parts, ignore_index=True), pd.concat(links, ignore_index=True))
    return activities, _settled(activities, linked)


def moment_times(activities: pd.DataFrame) -> Integers:
    """The recorded time of each moment: activity number n has the moments 2 n and 2 n + 1."""
    times: Integers = activities[["start_ns", "end_ns"]].to_numpy(np.int64).ravel()
    return times


def _settled(activities: pd.DataFrame, links: pd.DataFrame) -> pd.DataFrame:
    """The links with the times for which moments come when they were recorded, and with their sources when repeated."""
    time_ns = moment_times(activities)
    # A moment stands behind all that it is linked to: of moments at one time, those of earlier activities come first.
    begun_ns = activities.start_ns.where(activities.kind != "steps", activities.end_ns)
    place = np.argsort(np.lexsort((np.repeat(begun_ns, 2), time_ns)))
    links = links.assign(before=place[links.source], after=place[links.target])
    links = links[links.is_lapped | (links.before < links.after)]
    links = links.sort_values(["after", "before"], kind="stable", ignore_index=True)
    source, target, is_lapped = (links[name].to_numpy() for name in ("source", "target", "is_lapped"))
    measured_ns = time_ns[target] - time_ns[source]
    ns = np.where(is_lapped, links.ns, np.minimum(links.ns, measured_ns))
    reach_ns = pd.Series(np.where(is_lapped, -_MEASURED, time_ns[source] + ns))
    is_binding = np.isin(links.index, reach_ns.groupby(target).idxmax()) & ~is_lapped
    is_inside = activities.is_inside.to_numpy(bool)[source // 2]
    # A launch queue that was full before the steps is not known again.
    after_next = np.where(links.kind == "queue", NONE, activities.next.to_numpy()[source // 2])
    return links.drop(columns=["before", "after"]).assign(
        ns=np.where(is_binding, measured_ns, ns),
        is_binding=is_binding,
        unexplained_ns=np.where(is_binding, np.minimum(links.unexplained_ns, measured_ns), 0),
        from_moment=np.where(is_lapped | is_inside, source, after_next),
        is_lapped=is_lapped | ~is_inside,
    )


def _joined(activities: pd.DataFrame, links: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The graph in which a collective runs once its last rank has come, and each rank's kernel ends with it."""
    arrivals = activities[activities.match.notna()].reset_index(names="activity")
    groups = arrivals.groupby("match").start_ns
    # A kernel that ended before the last rank came did not wait for it.
    arrivals["last_ns"] = groups.transform("max")
    arrivals = arrivals[(arrivals.end_ns >= arrivals.last_ns) & (groups.transform("size") > 1)]
    join = len(activities) + arrivals.groupby("match").ngroup()
    joins = arrivals[activities.columns].assign(
        kind="join", start_ns=arrivals.last_ns, end_ns=arrivals.last_ns, is_inside=True, kernel=NONE
    )
    start, last = 2 * arrivals.activity, 2 * join + 1
    links = links[~((links.kind == "kernel") & links.source.isin(start))]
    rows = [links, _links("join", start, last, 0), _links("kernel", last, start + 1)]
    return pd.concat([activities, joins.groupby(join).first()]), pd.concat(rows, ignore_index=True)


def _links(
    kind: str, source: Any, target: Any, ns: Any = _MEASURED, unexplained_ns: Any = 0, is_lapped: bool = False
) -> pd.DataFrame:
    return pd.DataFrame({
        "source": source, "target": target, "ns": ns, "unexplained_ns": unexplained_ns, "kind": kind,
        "is_lapped": is_lapped,
    })  # fmt: skip


class _RankGraph:
    """The activities and `links` of one rank, numbered from `first`.

    The host's calls are in order, with two marks at the begin and end of the steps. Threads take turns, as PyTorch's
    main thread and autograd's do.
    """

    def __init__(self, trace: Trace, first: int) -> None:
        self._trace, (self._begin_ns, self._finish_ns) = trace, trace.clocked_ns
        kernels = trace.kernels[trace.kernels.is_clocked | (trace.kernels.launch_ns < self._begin_ns)]
        lane = kernels.groupby(["device", "stream"]).ngroup()
        self._kernels = kernels.assign(lane=lane, is_relaunch=kernels.duplicated("launch")).to_records()
        self._launched = np.argsort(self._kernels.launch_ns, kind="stable")
        self._calls = self._host_calls()
        # The moments at which calls and kernels start. Each ends with the moment behind.
        self._call = 2 * (first + np.arange(len(self._calls)))
        self._kernel = 2 * (first + len(self._calls) + np.arange(len(kernels)))
        self._finish = 2 * (first + len(self._calls) + len(kernels)) + 1
        self._begin, self._end = self._call[self._calls.name == ""]
        self._clocked_lanes = pd.Series(self._kernel, kernels.index)[kernels.is_clocked].groupby(lane)
        self.links = list[pd.DataFrame]()
        self._link_returns()
        self._link_host()
        self._link_kernels()

    def _host_calls(self) -> Any:
        calls = self._trace.events.calls
        is_launch = calls.index.isin(self._kernels.launch)
        is_sync = (calls.name.map(call_cause) == SYNCHRONIZING) & calls.thread.isin(calls.thread[is_launch])
        # Clocks that disagree may place the last kernel before its own launch, which is kept.
        is_kept = is_launch | (is_sync & (calls.start_ns <= self._finish_ns))
        calls = calls.assign(launch=np.where(is_launch, calls.index, NONE))[is_kept]
        at_ns = [self._begin_ns, self._finish_ns]
        marks = pd.DataFrame(
            {"name": "", "thread": self._trace.events.main_thread, "launch": NONE, "start_ns": at_ns, "end_ns": at_ns}
        )
        rows = pd.concat([marks[:1], calls, marks[1:]])[[*marks]]
        return rows.sort_values("start_ns", kind="stable").to_records()

    def activities(self) -> pd.DataFrame:
        """Rows as `Graph` describes them."""
        kernels, is_clocked = self._kernels, self._kernels.is_clocked
        # A kernel before the steps is replaced by the last one of its stream in the repetition before.
        last = self._clocked_lanes.last().add(1).reindex(kernels.lane, fill_value=NONE).to_numpy()
        steps = pd.DataFrame({
            "start_ns": [kernels.end_ns[~is_clocked].max(initial=self._begin_ns)],
            "end_ns": [kernels.end_ns[is_clocked].max(initial=self._finish_ns)],
        })  # fmt: skip
        columns = ["thread", "launch", *steps]
        calls, of_kernels = pd.DataFrame(self._calls[columns]), pd.DataFrame(kernels[[*columns, "match"]])
        rows = pd.concat([
            calls.assign(kind="call", kernel=NONE, is_inside=self._call >= self._begin, next=NONE),
            of_kernels.assign(kind="kernel", kernel=kernels.index, is_inside=is_clocked, next=last),
            steps.assign(kind="steps", thread=NONE, launch=NONE, kernel=NONE, is_inside=True, next=NONE),
        ], ignore_index=True)  # fmt: skip
        shift_ns = self._trace.shift_ns
        return rows.assign(start_ns=rows.start_ns + shift_ns, end_ns=rows.end_ns + shift_ns)

    def _add(self, *link: Any, **options: Any) -> None:
        self.links.append(_links(*link, **options))

    def _link_host(self) -> None:
        """Link each call to the one before it: to its end, or to its start where both ran at once."""
        calls = self._calls
        self._add("program", self._call[:-1] + (calls.end_ns[:-1] <= calls.start_ns[1:]), self._call[1:])
        self._add("program", [self._end + 1], [self._begin], 0, is_lapped=True)
        self._add("end", [self._end + 1], [self._finish], 0)

    def _link_kernels(self) -> None:
        """Link each kernel's start to its launch, the kernel before it on its stream, and those that it waits for."""
        kernels, number, position = self._kernels, self._kernel, np.arange(len(self._kernels))
        start_ns, end_ns, returned_ns, lane = kernels.start_ns, kernels.end_ns, kernels.returned_ns, kernels.lane
        is_linked, call_ns = kernels.launch != NONE, returned_ns - kernels.launch_ns
        # The median is over launches to an idle device. The first kernel never counts: what ran before it is not known.
        before_ns = np.maximum.accumulate(np.append(start_ns[:1], end_ns))[:-1]
        is_idle = is_linked & ~kernels.is_relaunch & (returned_ns > before_ns)
        latency_ns = _median((start_ns - returned_ns)[is_idle], _LATENCY_NS, _START_NS // 2)
        reach_ns = np.where(is_linked, returned_ns + np.clip(2 * latency_ns, _START_NS, _MAX_START_NS), 0)
        previous = pd.Series(position).groupby(lane).shift().dropna().astype(int)
        before, after = previous.to_numpy(), previous.index
        is_queued = returned_ns[after] + _QUEUED_LEAD_NS <= end_ns[before]
        gap_ns = _median((start_ns[after] - end_ns[before])[is_queued], KERNEL_GAP_NS, TOLERANCE_NS)
        source, target = self._stream_waits()
        # When each kernel could have begun at the latest, if its stream and the streams that it waits for were done.
        free_ns = np.zeros_like(reach_ns)
        free_ns[after] = end_ns[before]
        np.maximum.at(free_ns, target, end_ns[source])
        # Nothing tells why a kernel without a launch waited.
        is_gap = is_linked & (start_ns - free_ns <= KERNEL_GAP_NS)
        reach_ns = np.maximum(reach_ns, np.where(is_gap, start_ns, free_ns))
        # A kernel that nothing explains, and that began when one of another stream ended, waited for that one.
        last = self._ended_before(start_ns)
        is_waiting = (start_ns > reach_ns) & (lane[last] != lane) & (end_ns[last] <= start_ns)
        is_waiting &= end_ns[last] >= start_ns - KERNEL_GAP_NS
        source, target = np.append(source, last[is_waiting]), np.append(target, position[is_waiting])
        unexplained_ns = np.where(is_waiting, 0, np.maximum(start_ns - reach_ns, 0))
        # A kernel starts soon after its launch began, or else after a slow call returned.
        is_slow = (call_ns > _MAX_START_NS) & (start_ns >= returned_ns)
        least_ns = np.where(is_slow, 0, np.minimum(call_ns, _MAX_START_NS)) + latency_ns
        call = pd.Series(self._call, self._calls.launch)[kernels.launch[is_linked]] + is_slow[is_linked]
        self._add("launch", call.to_numpy(), number[is_linked], least_ns[is_linked], unexplained_ns[is_linked])
        self._add("order", number[before] + 1, number[after], gap_ns, unexplained_ns[after])
        self._add("wait", number[source] + 1, number[target], gap_ns, unexplained_ns[target])
        self._add("kernel", number, number + 1)
        # The steps have to sum to their causes, also where they begin with a kernel that nothing explains.
        is_first = ~pd.Series(lane).duplicated().to_numpy()
        self._add("wait", self._begin + 1, number[is_first & ~is_linked], 0, _MEASURED)
        lanes = self._clocked_lanes
        self._add("order", lanes.last() + 1, lanes.first(), gap_ns, is_lapped=True)
        self._add("end", lanes.last() + 1, self._finish, 0)

    def _ended_before(self, moments_ns: Integers) -> Integers:
        """The kernel that ended last before each moment, or the first to end."""
        ended = np.argsort(self._kernels.end_ns, kind="stable")
        return ended[np.maximum(np.searchsorted(self._kernels.end_ns[ended], moments_ns, side="right") - 1, 0)]

    def _stream_waits(self) -> tuple[Integers, Integers]:
        """Kernels, and later ones of other streams that wait for them.

        CUPTI tells neither the streams nor the events of `cudaStreamWaitEvent`. So the first kernel launched after such
        a call waits for the last ones of all other streams, if they ended before it began.
        """
        calls, kernels = self._trace.events.calls, self._kernels[self._launched]
        waits_ns = calls.start_ns[where(calls.name, _STREAM_WAIT.search) & np.isin(calls.thread, self._calls.thread)]
        waits = np.searchsorted(waits_ns, kernels.launch_ns)
        targets = np.flatnonzero((np.diff(waits, prepend=0) > 0) & (kernels.launch != NONE))
        pairs = [np.zeros((2, 0), dtype=np.int64)]
        for lane in np.unique(kernels.lane):
            members = np.flatnonzero(kernels.lane == lane)
            last = np.searchsorted(members, targets) - 1
            is_known = (last >= 0) & (kernels.lane[targets] != lane)
            pairs.append(np.stack((members[last[is_known]], targets[is_known])))
        source, target = self._launched[np.concatenate(pairs, axis=1)]
        is_over = self._kernels.end_ns[source] <= self._kernels.start_ns[target]
        return source[is_over], target[is_over]

    def _link_returns(self) -> None:
        """Link calls to the kernels that they wait for: synchronizes, copies to the host, launches to a full queue."""
        calls, kernels, number = self._calls, self._kernels, self._call
        least_ns = np.full(len(calls), _MEASURED)
        if not len(kernels):
            self._add("call", number, number + 1)
            return
        start_ns, end_ns, launched_ns = calls.start_ns, calls.end_ns, kernels.launch_ns[self._launched]
        last = self._ended_before(end_ns + TOLERANCE_NS)
        is_held = (kernels.end_ns[last] > start_ns) & (kernels.launch_ns[last] < end_ns)
        is_launch = calls.launch != NONE
        is_waiting = ~is_launch & (calls.name != "")
        call = pd.Series(np.flatnonzero(is_launch), calls.launch[is_launch])
        copies = np.flatnonzero(kernels.is_awaited)
        copying = call[kernels.launch[copies]].to_numpy()
        last[copying], is_held[copying], is_waiting[copying] = copies, True, True
        depth = np.searchsorted(launched_ns, start_ns) - np.searchsorted(np.sort(kernels.end_ns), start_ns)
        duration_ns = end_ns - start_ns
        usual_ns = _median(duration_ns[is_launch & (depth < _QUEUE_LENGTH)], _LATENCY_NS, _START_NS)
        is_full = is_launch & is_held & ~is_waiting & (duration_ns > _SLOW_LAUNCH * usual_ns) & (depth >= _QUEUE_LENGTH)
        # A synchronize with nothing to wait for comes after the last kernel that was launched before it.
        newest = self._launched[np.maximum(np.searchsorted(launched_ns, start_ns) - 1, 0)]
        is_idle = is_waiting & ~is_held & (kernels.launch_ns[newest] < start_ns) & (kernels.end_ns[newest] <= end_ns)
        is_held &= is_waiting | is_full
        least_ns[is_held] = np.where(is_full, usual_ns, 0)[is_held]
        ends, is_return = self._kernel + 1, is_held & is_waiting
        self._add("return", ends[last[is_return]], number[is_return] + 1)
        self._add("return", ends[newest[is_idle]], number[is_idle] + 1, 0)
        self._add("queue", ends[last[is_full]], number[is_full] + 1)
        self._add("call", number, number + 1, least_ns)
        # The profiler aligns the clocks only so far: no call returns before the kernel that it waits for has ended.
        calls.end_ns = np.where(is_held, np.maximum(end_ns, kernels.end_ns[last] + 1), end_ns)


def _median(times_ns: Integers, limit_ns: int, default: int) -> int:
    """The median of the times between 0 and a limit; the default without such times."""
    times_ns = times_ns[(times_ns >= 0) & (times_ns <= limit_ns)]
    return int(np.median(times_ns)) if len(times_ns) else default
