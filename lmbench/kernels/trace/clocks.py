"""The device's time by phase, from the trace alone: busy, and idle for one of three reasons; and communication."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from lmbench.kernels.trace.events import Events, Flags, Integers, Launches, Stops
from lmbench.kernels.trace.kernels import KernelTable
from lmbench.kernels.trace.phases import NO_PHASE, OUTSIDE, PHASE_ORDER, UNLINKED, PhaseTimeline, TracePhase

# On an idle device a kernel starts 2.3 us after its launch call returned (H200, CUDA 13; 5th to 95th percentile 1.9 to
# 2.6 us). If the call returned earlier than this before the kernel in front ended, the kernel lay in the queue.
QUEUED_LEAD_NS = 2_000
# A kernel that starts later than this after its launch call returned waits for something else than the host. Of 24,000
# that an idle H200 started none took more than 4.7 us; an MI300 takes 14 to 25 us: twice the trace's own median, within
# these limits.
START_NS = 5_000
MAX_START_NS = 50_000
# Latencies beyond this are waits for something, and none of starting.
_LATENCY_NS = 100_000
#: Between two queued kernels the device needs 1.1 us (H200), and up to 17 us in what was seen of H100, MI300 and older
#: ones; a longer gap has another reason. Holistic Trace Analysis draws the line at the same 30 us
#: (`consecutive_kernel_delay=30`; its documentation says ns, its times are us).
KERNEL_GAP_NS = 30_000
# Of the window: less without a kernel, as lies between two ranges of the host, is no row of its own.
_SLIVER_FRACTION = 0.005
#: Kinds of kernels that do not compute: what they are beside does.
_NO_COMPUTE = ("comm", "memcpy")


@dataclass(frozen=True)
class DeviceTime:
    """Time on the device, as means per step.

    `window_s` is the sum of the four below it. `busy_s` is the union of kernels, copies and fills. Idle time is that in
    which none of them runs, on any stream of the device, by the kernel that ends it: `host_wait_s` until that kernel
    was launched and could start, `queued_gap_s` where it lay in the queue and followed within `KERNEL_GAP_NS`,
    `other_idle_s` all else: it waited for another stream, a copy or another rank, or has no launch in the trace.
    `comm_s` is the union of communication kernels, `comm_overlapped_s` how much of it ran beside kernels that compute
    (neither communication nor copies).
    """

    window_s: float
    busy_s: float
    queued_gap_s: float
    host_wait_s: float
    other_idle_s: float
    comm_s: float
    comm_overlapped_s: float

    @property
    def idle_s(self) -> float:
        return self.queued_gap_s + self.host_wait_s + self.other_idle_s

    @property
    def comm_exposed_s(self) -> float:
        """Communication beside which nothing computes."""
        return self.comm_s - self.comm_overlapped_s

    @property
    def idle_fraction(self) -> float | None:
        return self._share(self.idle_s)

    @property
    def wait_fraction(self) -> float | None:
        """Share of the window in which the device waited for the host."""
        return self._share(self.host_wait_s)

    @property
    def gap_fraction(self) -> float | None:
        return self._share(self.queued_gap_s)

    @property
    def other_fraction(self) -> float | None:
        return self._share(self.other_idle_s)

    def _share(self, seconds: float) -> float | None:
        return seconds / self.window_s if self.window_s > 0 else None


@dataclass(frozen=True)
class PhaseClock(DeviceTime):
    """The device's time with one phase, summed over devices.

    `queued_gaps` is the number of gaps in `queued_gap_s`, `first_wait_s` the part of `host_wait_s` before the phase's
    first kernel, `stop_wait_s` what stops of the host can have cost of it: no more than they took until then.
    `longest_idle_s` is the longest unbroken idle time of all steps. `host_s` is the host's time in the phase under the
    profiler, `stopped_s` of it that of its `stops`: calls in which it waits until the device is done. `launches` are
    calls of the host, `graph_launches` those of them that launch a graph.
    """

    phase: TracePhase
    host_s: float
    stopped_s: float
    stops: float
    queued_gaps: float
    first_wait_s: float
    stop_wait_s: float
    longest_idle_s: float
    launches: float
    graph_launches: float
    kernels: float
    median_kernel_s: float | None

    @property
    def host_s_per_launch(self) -> float | None:
        """Without its stops."""
        return (self.host_s - self.stopped_s) / self.launches if self.launches else None


@dataclass(frozen=True)
class DeviceClock(DeviceTime):
    """All of one device's time; `device` is its number in the trace.

    `kernel_span_s` is from the start of its first kernel to the end of its last, which leaves out what the host does in
    the first step before and in the last behind.
    """

    device: int
    kernel_span_s: float

    @property
    def idle_within_fraction(self) -> float:
        """Share of idle time between the first kernel and the last."""
        return max(1 - self.busy_s / self.kernel_span_s, 0.0) if self.kernel_span_s else 0.0


@dataclass(frozen=True)
class Clocks:
    """The phases' clocks in the order of a step, over `steps` steps from the `skipped`th on; the same by device.

    `is_whole_trace`: the steps are not known to the moment, and the clocks run over all that was traced, what lies
    outside of phases included.
    """

    phases: list[PhaseClock]
    devices: list[DeviceClock]
    steps: int
    skipped: int
    is_whole_trace: bool

    @property
    def whole(self) -> DeviceTime:
        """All that the clocks run over, outside of phases, too."""
        return total(self.devices)


def total(parts: Sequence[DeviceTime]) -> DeviceTime:
    """The sum of some."""
    return DeviceTime(*(sum(getattr(part, one.name) for part in parts) for one in fields(DeviceTime)))


def phase_clocks(kernels: KernelTable, events: Events, timeline: PhaseTimeline) -> Clocks:
    """Clocks of every phase that the host was in or that has kernels.

    Each moment of each device belongs to one phase. Where kernels run it is that of their launch; of several phases'
    at once, that of what computes before that of a copy or of communication, and of those the one that the host was in
    first: a copy for the next step beside a backward pass does not end it, and a collective that still runs beside the
    optimizer does not lengthen it. Idle time belongs to the phase whose kernel ends it, with two exceptions: the device
    waits in the phase that the host is in then, and a gap between queued kernels belongs to the one before, as it does
    by events on the stream. A kernel without a launch is of no phase: it has `unlinked` for itself, unless
    another runs beside it.

    With lmbench's steps the clock runs over them, without the first of several: the recording starts on an idle device,
    where the host first has to get ahead. Else it runs over the whole trace.
    """
    begun = len(timeline.step_start_ns)
    is_whole = not (begun and len(timeline.start_ns))
    skipped = 1 if not is_whole and begun > 1 and begun == timeline.steps else 0
    steps = timeline.steps - skipped
    if not kernels.names:
        return Clocks([], [], steps, skipped, is_whole)
    queue = _queue(kernels, events.launches)
    pieces = _pieces(queue, timeline, None if is_whole else skipped)
    place = pieces.place(queue)
    stops = _stops(kernels, events.launches, events.stops, pieces.begin_ns)
    is_clocked = np.zeros(len(pieces.border_ns) + 1, dtype=np.bool_)
    is_clocked[[index for index, _ in pieces.clocked]] = True
    sums: dict[TracePhase, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    devices = []
    for device in np.unique(kernels.device).tolist():
        own = np.flatnonzero(kernels.device == device)
        columns = _device(queue.of(own), place[own], pieces, stops)
        times: dict[str, float] = defaultdict(float)
        for index, phase in pieces.clocked:
            of_phase = sums[phase]
            for name, column in columns.items():
                value = float(column[index])
                times[name] += value
                of_phase[name] = max(of_phase[name], value) if name == "longest" else of_phase[name] + value
        own = own[is_clocked[place[own]]]
        span_ns = int(kernels.end_ns[own].max() - kernels.start_ns[own].min()) if len(own) else 0
        devices.append(DeviceClock(**_means(times, steps), device=device, kernel_span_s=span_ns / 1e9 / steps))
    # The host may have launched for long before the device's clock begins.
    borders = np.maximum(pieces.border_ns, pieces.begin_ns)
    host_ns, stopped_ns = (np.append(np.diff(time), 0) for time in (borders, _covered(*stops)(borders)))
    stop_count = np.append(np.diff(np.searchsorted(stops[0], pieces.border_ns)), 0)
    for index, phase in pieces.clocked:
        for name, column in (("host", host_ns), ("stopped", stopped_ns), ("stops", stop_count)):
            sums[phase][name] += float(column[index])
    sliver_ns = _SLIVER_FRACTION * sum(of_phase["window"] for of_phase in sums.values())
    present = [phase for phase in PHASE_ORDER if phase in sums]
    present = [p for p in present if p not in NO_PHASE or sums[p]["busy"] or sums[p]["window"] > sliver_ns]
    members = np.flatnonzero(is_clocked[place])
    clocks = [_clock(phase, sums[phase], kernels, events.launches, members, steps) for phase in present]
    return Clocks(clocks, devices, steps, skipped, is_whole)


def _means(sums: dict[str, float], steps: int) -> dict[str, float]:
    """Seconds per step of what a device's time is made of, from sums in ns."""
    names = {
        "window_s": "window", "busy_s": "busy", "queued_gap_s": "gap", "host_wait_s": "wait", "other_idle_s": "other",
        "comm_s": "comm", "comm_overlapped_s": "overlapped",
    }  # fmt: skip
    return {name: sums[key] / 1e9 / steps for name, key in names.items()}


def _clock(
    phase: TracePhase, sums: dict[str, float], kernels: KernelTable, launches: Launches, members: Integers, steps: int
) -> PhaseClock:
    own = np.array([index for index in members if kernels.phases[index] == phase], dtype=np.int64)
    launch = np.unique(kernels.launch[own][kernels.is_linked[own]])
    return PhaseClock(
        **_means(sums, steps),
        phase=phase,
        host_s=sums["host"] / 1e9 / steps,
        stopped_s=sums["stopped"] / 1e9 / steps,
        stops=sums["stops"] / steps,
        queued_gaps=sums["gaps"] / steps,
        first_wait_s=sums["first_wait"] / 1e9 / steps,
        stop_wait_s=sums["stop_wait"] / 1e9 / steps,
        longest_idle_s=sums["longest"] / 1e9,
        launches=len(launch) / steps,
        graph_launches=sum("GraphLaunch" in launches.names[index] for index in launch) / steps,
        kernels=len(own) / steps,
        median_kernel_s=float(np.median(kernels.duration_ns[own])) / 1e9 if len(own) else None,
    )


@dataclass(frozen=True)
class _Queue:
    """Kernels by start. `begun_ns` and `returned_ns` are of the launch; `is_next` says that the same launch had a
    kernel before, as in a CUDA graph: nothing of the host's lies between them. `latency_ns` is how long after its
    launch a kernel may start on an idle device.
    """

    start_ns: Integers
    end_ns: Integers
    is_linked: Flags
    is_next: Flags
    begun_ns: Integers
    returned_ns: Integers
    is_comm: Flags
    is_compute: Flags
    latency_ns: int

    def of(self, own: Integers) -> _Queue:
        columns = {one.name: getattr(self, one.name)[own] for one in fields(self) if one.name != "latency_ns"}
        return _Queue(**columns, latency_ns=self.latency_ns)


def _queue(kernels: KernelTable, launches: Launches) -> _Queue:
    is_linked, launch = kernels.is_linked, kernels.launch
    # Without a launch nothing says when the host was there; the kernel's own start stands for it where one is needed.
    begun, returned = kernels.start_ns.copy(), kernels.start_ns.copy()
    begun[is_linked] = launches.start_ns[launch[is_linked]]
    returned[is_linked] = launches.end_ns[launch[is_linked]]
    is_next = is_linked.copy()
    # The first of each launch, kernels being in the order of their starts.
    is_next[np.unique(launch, return_index=True)[1]] = False
    end_so_far = np.concatenate((kernels.start_ns[:1], np.maximum.accumulate(kernels.end_ns)[:-1]))
    late = (kernels.start_ns - returned)[is_linked & ~is_next & (returned > end_so_far)]
    late = late[(late >= 0) & (late <= _LATENCY_NS)]
    latency = min(max(2 * int(np.median(late)), START_NS), MAX_START_NS) if len(late) else START_NS
    kinds = np.array(kernels.kinds)
    return _Queue(
        kernels.start_ns, kernels.end_ns, is_linked, is_next, begun, returned,
        kinds == "comm", ~np.isin(kinds, _NO_COMPUTE), latency,
    )  # fmt: skip


def _stops(kernels: KernelTable, launches: Launches, stops: Stops, begin_ns: int) -> tuple[Integers, Integers]:
    """Start and end of the host's stops, apart from each other: of threads that launch, and without a launch
    meanwhile, as far as they end after the device's clock began.

    A copy is one, too, if its call returned after it had ended, as copies to memory that is not pinned do.
    """
    is_launching = np.isin(stops.thread, launches.thread)
    copies = np.flatnonzero(kernels.is_linked & (np.array(kernels.kinds) == "memcpy"))
    calls = kernels.launch[copies]
    calls = calls[launches.end_ns[calls] >= kernels.end_ns[copies]] if len(copies) else calls
    start = np.concatenate((stops.start_ns[is_launching], launches.start_ns[calls]))
    end = np.concatenate((stops.end_ns[is_launching], launches.end_ns[calls]))
    # The call of a copy is a launch itself.
    launched = np.searchsorted(launches.start_ns, end) - np.searchsorted(launches.start_ns, start, side="right")
    is_stop = (launched == 0) & (end > begin_ns)
    start, end = start[is_stop], end[is_stop]
    order = np.argsort(start, kind="stable")
    return _owned(start[order], end[order])[:2]


@dataclass(frozen=True)
class _Pieces:
    """What the host did when: piece k, from one border to the next, is of one phase. Behind the pieces is a place for
    kernels without a launch, and one for those of them that are not clocked.

    `clocked` are places with their phases. The device's clock starts at `begin_ns` and goes on to `end_ns` at least.
    """

    border_ns: Integers
    clocked: list[tuple[int, TracePhase]]
    begin_ns: int
    end_ns: int

    @property
    def count(self) -> int:
        return len(self.border_ns) - 1

    def place(self, queue: _Queue) -> Integers:
        """Each kernel's place."""
        piece = np.searchsorted(self.border_ns[1:-1], queue.begun_ns, side="right")
        unlinked = np.where(queue.start_ns >= self.begin_ns, self.count, self.count + 1)
        return np.where(queue.is_linked, piece, unlinked)


def _pieces(queue: _Queue, timeline: PhaseTimeline, skipped: int | None) -> _Pieces:
    """The timeline's pieces, with what lies before, between and after them, outside of any phase; clocked are all, or
    lmbench's steps without the first so many."""
    first_ns, last_ns = int(queue.start_ns[0]), int(queue.end_ns.max())
    span = timeline.span_ns or (first_ns, first_ns)
    begin, end = min(first_ns, span[0]), max(last_ns, span[1])
    # Kernels in a queue start after their launches, and launches can go on after the last kernel.
    launched = queue.is_linked
    earliest = int(queue.begun_ns[launched].min(initial=begin))
    latest = int(queue.returned_ns[launched].max(initial=end))
    moments = [min(begin, earliest)]
    named: list[TracePhase] = [OUTSIDE]
    for start, stop, phase in zip(timeline.start_ns.tolist(), timeline.end_ns.tolist(), timeline.phases, strict=True):
        moments += [start, stop]
        named += [phase, OUTSIDE]
    borders = np.array([*moments, max(end, latest)], dtype=np.int64)
    clocked = list(enumerate(named))
    if skipped is not None:
        # lmbench's steps: no more than from the first that counts to the end of the last phase.
        begin = int(timeline.step_start_ns[skipped]) if skipped else int(timeline.start_ns[0])
        clocked = [(k, phase) for k, phase in clocked if borders[k] >= begin and k < len(named) - 1]
        end = int(borders[-2])
    return _Pieces(borders, [*clocked, (len(named), UNLINKED)], begin, end)


def _device(queue: _Queue, place: Integers, pieces: _Pieces, stops: tuple[Integers, Integers]) -> dict[str, Integers]:
    """One device's times in ns by place: the sum of busy, gaps, waits and other idle time is the window."""
    count = pieces.count + 2
    gaps = _Gaps(queue, place, pieces, stops)

    def by_place(where: Integers, weights: Integers) -> Integers:
        return np.bincount(where, weights=weights, minlength=count).astype(np.int64)

    # What computes goes before what does not, and what has a launch before what has none; then the earlier piece.
    rank = place + np.where(queue.is_linked & ~queue.is_compute, count, 0) + np.where(queue.is_linked, 0, 2 * count)
    start, end, owner = _owned(queue.start_ns, queue.end_ns, rank)
    busy = by_place(owner % count, end - start)
    comm = queue.is_comm
    start, end, owner = _owned(queue.start_ns[comm], queue.end_ns[comm], place[comm])
    computing = _covered(*_owned(queue.start_ns[queue.is_compute], queue.end_ns[queue.is_compute])[:2])
    found = {
        "busy": busy,
        "comm": by_place(owner, end - start),
        "overlapped": by_place(owner, computing(end) - computing(start)),
        "gap": by_place(gaps.queued_place, gaps.queued_ns),
        "gaps": by_place(gaps.queued_place, (gaps.queued_ns > 0).astype(np.int64)),
        "wait": gaps.wait_ns,
        "first_wait": gaps.first_wait_ns,
        "stop_wait": by_place(place, gaps.stop_wait_ns),
        "other": by_place(place, gaps.other_ns),
        "longest": gaps.longest_ns,
    }
    found["window"] = found["busy"] + found["gap"] + found["wait"] + found["other"]
    return found


class _Gaps:
    """Idle time of one device: before each kernel what is queued and other, by place what waits for the host."""

    def __init__(self, queue: _Queue, place: Integers, pieces: _Pieces, stops: tuple[Integers, Integers]) -> None:
        start, count = queue.start_ns, pieces.count + 2
        since = min(pieces.begin_ns, int(start[0]))
        done = np.concatenate(([since], np.maximum.accumulate(queue.end_ns)))
        tail, done = int(done[-1]), np.minimum(done[:-1], start)
        is_queued = queue.is_linked & (queue.is_next | (queue.returned_ns + QUEUED_LEAD_NS <= done))
        # The first kernel of all has none in front.
        is_queued[0] = False
        waited = np.where(
            is_queued | ~queue.is_linked, done, np.clip(queue.returned_ns + queue.latency_ns, done, start)
        )
        is_short = is_queued & (start - done <= KERNEL_GAP_NS)
        self.queued_ns = np.where(is_short, start - done, 0)
        # The kernel that ran last.
        ends = np.maximum.accumulate(queue.end_ns)
        before_it = np.maximum.accumulate(np.where(queue.end_ns == ends, np.arange(len(start)), 0))
        before_it = np.concatenate(([0], before_it[:-1]))
        self.queued_place = np.where(queue.is_linked[before_it], place[before_it], place)
        self.other_ns = np.where(is_short, 0, start - waited)
        # Up to the launch the device waits for what the host does in the meantime, and then for what it launched.
        launched = np.clip(queue.begun_ns, done, waited)
        # Without its stops the host would be ahead by as much, until waits have used that up.
        ahead = np.cumsum(np.diff(_covered(*stops)(done), prepend=0) - (waited - done))
        unmet = -np.minimum(np.minimum.accumulate(ahead), 0)
        self.stop_wait_ns = waited - done - np.diff(unmet, prepend=0)
        borders = pieces.border_ns
        before = _covered(np.append(done, tail), np.append(launched, max(tail, pieces.end_ns)))
        self.wait_ns = np.bincount(place, weights=waited - launched, minlength=count).astype(np.int64)
        self.wait_ns[: pieces.count] += np.diff(before(borders))
        first = np.full(count, np.iinfo(np.int64).max)
        np.minimum.at(first, place, start)
        is_first = start <= first[place]
        self.first_wait_ns = np.bincount(
            place[is_first], weights=(waited - launched)[is_first], minlength=count
        ).astype(np.int64)
        until = np.clip(first[: pieces.count], borders[:-1], borders[1:])
        self.first_wait_ns[: pieces.count] += before(until) - before(borders[:-1])
        self.longest_ns = np.zeros(count, dtype=np.int64)
        entered = np.append(borders, 0)[place]
        np.maximum.at(self.longest_ns, place, start - np.maximum(done, np.minimum(entered, start)))


def _owned(start: Integers, end: Integers, rank: Integers | None = None) -> tuple[Integers, Integers, Integers]:
    """The union of intervals, which come by start, cut where the lowest rank among those that run changes; with it."""
    rank = np.zeros(len(start), dtype=np.int64) if rank is None else rank
    if (start[1:] >= np.maximum.accumulate(end)[:-1]).all():
        return start, end, rank
    found: list[tuple[int, int, int]] = []
    running: list[tuple[int, int]] = []
    now = 0

    def run(until: int) -> None:
        nonlocal now
        while running and now < until:
            lowest, stop = running[0]
            if stop <= now:
                heapq.heappop(running)
                continue
            stop = min(stop, until)
            if found and found[-1][1:] == (now, lowest):
                found[-1] = (found[-1][0], stop, lowest)
            else:
                found.append((now, stop, lowest))
            now = stop

    for begin, stop, own in zip(start.tolist(), end.tolist(), rank.tolist(), strict=True):
        run(begin)
        now = max(now, begin)
        heapq.heappush(running, (own, stop))
    run(int(end.max()))
    columns = np.array(found, dtype=np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _covered(start: Integers, end: Integers) -> Callable[[Integers], Integers]:
    """How much of the time up to a moment lies within intervals (apart from each other, in order)."""
    lengths = np.concatenate(([0], np.cumsum(end - start)))

    def up_to(moments: Integers) -> Integers:
        if not len(start):
            return np.zeros(len(moments), dtype=np.int64)
        place = np.searchsorted(start, moments, side="right") - 1
        inside = np.where(place >= 0, np.minimum(moments, end[place]) - start[place], 0)
        found: Integers = np.where(place >= 0, lengths[np.maximum(place, 0)] + inside, 0)
        return found

    return up_to
