"""The device's time by phase, from the trace alone: busy, and idle for one of three reasons; and communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from lmbench.kernels.events import Events, TraceEvents, Words
from lmbench.kernels.phases import NO_PHASE, OUTSIDE, PHASE_ORDER, UNLINKED, PhaseTimeline, TracePhase
from lmbench.kernels.trace import KernelTable
from lmbench.records.intervals import Flags, Integers, covered, paint, union

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

    def share(self, seconds: float) -> float | None:
        """Share of the window."""
        return seconds / self.window_s if self.window_s > 0 else None

    @property
    def idle_fraction(self) -> float | None:
        return self.share(self.idle_s)


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
    return DeviceTime(*(sum(getattr(part, field.name) for part in parts) for field in fields(DeviceTime)))


def phase_clocks(kernels: KernelTable, events: TraceEvents, timeline: PhaseTimeline) -> Clocks:
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
    if not len(kernels):
        return Clocks([], [], steps, skipped, is_whole)
    queue = _queue(kernels, events.launches)
    host = _host_pieces(queue, timeline, None if is_whole else skipped)
    place = host.place(queue)
    stops = _stops(kernels, events, host.begin_ns)
    # The host may have launched for long before the device's clock begins.
    borders = np.maximum(host.border_ns, host.begin_ns)
    times = {
        "host_s": _padded(np.diff(borders)),
        "stopped_s": _padded(np.diff(covered(*stops)(borders))),
        "stops": _padded(np.diff(np.searchsorted(stops[0], host.border_ns))),
    }
    devices = []
    for device in np.unique(kernels.events.device).tolist():
        rows = np.flatnonzero(kernels.events.device == device)
        columns = _device_times(queue.take(rows), place[rows], host, stops)
        for name, column in columns.items():
            times[name] = (np.maximum if name == "longest_idle_s" else np.add)(times.get(name, 0), column)
        rows = rows[host.is_clocked[place[rows]]]
        span_ns = np.ptp(np.append(queue.start_ns[rows], queue.end_ns[rows])) if len(rows) else 0
        sums = {each.name: columns[each.name][host.is_clocked].sum() for each in fields(DeviceTime)}
        devices.append(DeviceClock(**_means(sums | {"kernel_span_s": span_ns}, steps), device=device))
    clocks = []
    sliver_ns = _SLIVER_FRACTION * times["window_s"][host.is_clocked].sum()
    for phase in PHASE_ORDER:
        is_phase = host.is_clocked & (host.phases == phase)
        sums = {name: column[is_phase].sum() for name, column in times.items()}
        if not is_phase.any() or (phase in NO_PHASE and not sums["busy_s"] and sums["window_s"] <= sliver_ns):
            continue
        rows = np.flatnonzero(host.is_clocked[place] & (np.array(kernels.phases) == phase))
        launch = np.unique(kernels.launch[rows][kernels.is_linked[rows]])
        sums |= {"launches": len(launch), "kernels": len(rows)}
        sums["graph_launches"] = sum("GraphLaunch" in name for name in events.launches.names[launch])
        # These are no means over steps.
        sums["longest_idle_s"] = times["longest_idle_s"][is_phase].max() * steps
        median_s = float(np.median(kernels.duration_ns[rows])) / 1e9 if len(rows) else None
        clocks.append(PhaseClock(**_means(sums, steps), phase=phase, median_kernel_s=median_s))
    return Clocks(clocks, devices, steps, skipped, is_whole)


def _padded(column: Integers) -> Integers:
    """A column of the host's pieces, with zeros for the two places of kernels without a launch."""
    return np.append(column, [0, 0])


def _means(sums: Mapping[str, Any], steps: int) -> dict[str, float]:
    """Means per step of sums, of which those of time are in ns."""
    return {name: float(value) / steps / (1e9 if name.endswith("_s") else 1) for name, value in sums.items()}


@dataclass(frozen=True)
class _Queue:
    """Kernels by start. `begun_ns` and `returned_ns` are of the launch, `ready_ns` is when the kernel could start on an
    idle device; `is_next` says that the same launch had a kernel before, as in a CUDA graph: nothing of the host's lies
    between them.
    """

    start_ns: Integers
    end_ns: Integers
    begun_ns: Integers
    returned_ns: Integers
    ready_ns: Integers
    is_linked: Flags
    is_next: Flags
    is_comm: Flags
    is_compute: Flags

    def take(self, rows: Integers) -> _Queue:
        return _Queue(*(getattr(self, field.name)[rows] for field in fields(self)))


def _queue(kernels: KernelTable, launches: Events) -> _Queue:
    start, end = kernels.events.start_ns, kernels.events.end_ns
    is_linked, launch, kinds = kernels.is_linked, kernels.launch, np.array(kernels.kinds)
    # Without a launch nothing says when the host was there; the kernel's own start stands for it where one is needed.
    begun, returned = start.copy(), start.copy()
    begun[is_linked] = launches.start_ns[launch[is_linked]]
    returned[is_linked] = launches.end_ns[launch[is_linked]]
    is_next = is_linked.copy()
    # The first of each launch, kernels being in the order of their starts.
    is_next[np.unique(launch, return_index=True)[1]] = False
    end_so_far = np.append(start[:1], np.maximum.accumulate(end)[:-1])
    late = (start - returned)[is_linked & ~is_next & (returned > end_so_far)]
    late = late[(late >= 0) & (late <= _LATENCY_NS)]
    latency = np.clip(2 * int(np.median(late)), START_NS, MAX_START_NS) if len(late) else START_NS
    is_comm = kinds == "comm"
    return _Queue(
        start, end, begun, returned, returned + latency, is_linked, is_next, is_comm, ~is_comm & (kinds != "memcpy")
    )


def _stops(kernels: KernelTable, events: TraceEvents, begin_ns: int) -> tuple[Integers, Integers]:
    """Start and end of the host's stops, apart from each other: of threads that launch, and without a launch
    meanwhile, as far as they end after the device's clock began.

    A copy is one, too, if its call returned after it had ended, as copies to memory that is not pinned do.
    """
    launches, stops = events.launches, events.stops.take(np.isin(events.stops.thread, events.launches.thread))
    copies = np.flatnonzero(kernels.is_linked & (np.array(kernels.kinds) == "memcpy"))
    copies = copies[launches.end_ns[kernels.launch[copies]] >= kernels.events.end_ns[copies]]
    start = np.append(stops.start_ns, launches.start_ns[kernels.launch[copies]])
    end = np.append(stops.end_ns, launches.end_ns[kernels.launch[copies]])
    # The call of a copy is a launch itself.
    launched = np.searchsorted(launches.start_ns, end) - np.searchsorted(launches.start_ns, start, side="right")
    is_stop = (launched == 0) & (end > begin_ns)
    return union(start[is_stop], end[is_stop])


@dataclass(frozen=True)
class _HostPieces:
    """What the host did when: place k, from one border to the next, is of one phase. Behind these pieces is a place for
    kernels without a launch, and one for those of them that are not clocked.

    `phases` and `is_clocked` have an entry for each place. The device's clock starts at `begin_ns` and goes on to
    `end_ns` at least.
    """

    border_ns: Integers
    phases: Words
    is_clocked: Flags
    begin_ns: int
    end_ns: int

    def place(self, queue: _Queue) -> Integers:
        """Each kernel's place."""
        piece = np.searchsorted(self.border_ns[1:-1], queue.begun_ns, side="right")
        unlinked = len(self.phases) - np.where(queue.start_ns >= self.begin_ns, 2, 1)
        return np.where(queue.is_linked, piece, unlinked)

    def by_place(self, place: Integers, weights: Integers) -> Integers:
        """Sums of weights by their places."""
        return np.bincount(place, weights=weights, minlength=len(self.phases)).astype(np.int64)


def _host_pieces(queue: _Queue, timeline: PhaseTimeline, skipped: int | None) -> _HostPieces:
    """The timeline's pieces, with what lies before, between and after them, outside of any phase; clocked are all, or
    lmbench's steps without the first so many."""
    first_ns, last_ns = int(queue.start_ns[0]), int(queue.end_ns.max())
    span = timeline.span_ns or (first_ns, first_ns)
    begin, end = min(first_ns, span[0]), max(last_ns, span[1])
    # Kernels in a queue start after their launches, and launches can go on after the last kernel.
    first, last = min(begin, int(queue.begun_ns.min())), max(end, int(queue.returned_ns.max()))
    inner = np.column_stack((timeline.start_ns, timeline.end_ns)).ravel()
    borders = np.concatenate(([first], inner, [last]))
    phases = [OUTSIDE, *(name for phase in timeline.phases for name in (phase, OUTSIDE)), UNLINKED, UNLINKED]
    is_clocked = np.arange(len(phases)) < len(phases) - 1
    if skipped is not None:
        # lmbench's steps: no more than from the first that counts to the end of the last phase.
        begin = int(timeline.step_start_ns[skipped]) if skipped else int(timeline.start_ns[0])
        is_clocked[: len(borders) - 1] = borders[:-1] >= begin
        is_clocked[len(borders) - 2] = False
        end = int(borders[-2])
    return _HostPieces(borders, np.array(phases, dtype=object), is_clocked, begin, end)


def _device_times(
    queue: _Queue, place: Integers, host: _HostPieces, stops: tuple[Integers, Integers]
) -> dict[str, Integers]:
    """One device's times in ns by place: the sum of busy, gap, wait and other idle time is the window."""
    places = len(host.phases)
    # What computes goes before what does not, and what has a launch before what has none; then the earlier piece.
    rank = place + np.select([~queue.is_linked, ~queue.is_compute], [2 * places, places])
    start, end, owner = paint(queue.start_ns, queue.end_ns, rank)
    busy = host.by_place(place[owner], end - start)
    comm = np.flatnonzero(queue.is_comm)
    start, end, owner = paint(queue.start_ns[comm], queue.end_ns[comm], place[comm])
    computing = covered(*union(queue.start_ns[queue.is_compute], queue.end_ns[queue.is_compute]))
    idle = _idle_times(queue, place, host, stops)
    return {
        "window_s": busy + idle["queued_gap_s"] + idle["host_wait_s"] + idle["other_idle_s"],
        "busy_s": busy,
        "comm_s": host.by_place(place[comm][owner], end - start),
        "comm_overlapped_s": host.by_place(place[comm][owner], computing(end) - computing(start)),
        **idle,
    }


def _idle_times(
    queue: _Queue, place: Integers, host: _HostPieces, stops: tuple[Integers, Integers]
) -> dict[str, Integers]:
    """Idle time of one device before each kernel, in ns by place: what is queued, waits for the host, and other."""
    start, ends = queue.start_ns, np.maximum.accumulate(queue.end_ns)
    # When the device became idle.
    done = np.minimum(np.append(min(host.begin_ns, int(start[0])), ends[:-1]), start)
    is_queued = queue.is_linked & (queue.is_next | (queue.returned_ns + QUEUED_LEAD_NS <= done))
    # The first kernel of all has none in front.
    is_queued[0] = False
    waited = np.where(is_queued | ~queue.is_linked, done, np.clip(queue.ready_ns, done, start))
    is_short = is_queued & (start - done <= KERNEL_GAP_NS)
    # A gap is of the kernel that ran last.
    last = np.maximum.accumulate(np.where(queue.end_ns == ends, np.arange(len(start)), 0))
    before = np.append(0, last[:-1])
    gap_place = np.where(queue.is_linked[before], place[before], place)
    gap = np.where(is_short, start - done, 0)
    # Up to the launch the device waits for what the host does in the meantime, and then for what it launched.
    launched = np.clip(queue.begun_ns, done, waited)
    for_host = covered(np.append(done, ends[-1]), np.append(launched, max(int(ends[-1]), host.end_ns)))
    # Without its stops the host would be ahead by as much, until waits have used that up.
    ahead = np.cumsum(np.diff(covered(*stops)(done), prepend=0) - (waited - done))
    unmet = -np.minimum(np.minimum.accumulate(ahead), 0)
    first = np.full(len(host.phases), np.iinfo(np.int64).max)
    np.minimum.at(first, place, start)
    is_first = start <= first[place]
    borders = host.border_ns
    until_first = for_host(np.clip(first[:-2], borders[:-1], borders[1:])) - for_host(borders[:-1])
    longest = np.zeros(len(host.phases), dtype=np.int64)
    entered = np.append(borders, 0)[place]
    np.maximum.at(longest, place, start - np.maximum(done, np.minimum(entered, start)))
    return {
        "queued_gap_s": host.by_place(gap_place, gap),
        "queued_gaps": host.by_place(gap_place, np.sign(gap)),
        "host_wait_s": host.by_place(place, waited - launched) + _padded(np.diff(for_host(borders))),
        "first_wait_s": host.by_place(place, np.where(is_first, waited - launched, 0)) + _padded(until_first),
        "stop_wait_s": host.by_place(place, waited - done - np.diff(unmet, prepend=0)),
        "other_idle_s": host.by_place(place, np.where(is_short, 0, start - waited)),
        "longest_idle_s": longest,
    }
