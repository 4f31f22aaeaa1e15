"""The device's time by phase, from the trace alone: busy, and idle for one of three reasons; and communication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from lmbench.kernels.events import Events, TraceEvents
from lmbench.kernels.phases import NO_PHASE, PHASE_ORDER, UNLINKED, PhaseTimeline
from lmbench.records.intervals import NONE, Integers, covered, paint, union

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


@dataclass(frozen=True, eq=False)
class Clocks:
    """Time on the device, as means per step over `steps` steps from the `skipped`th on: `phases`, a frame by phase in
    the order of a step, summed over devices, and `devices`, one by the device's number in the trace.

    Columns of both: `window_s` is the sum of the four behind it. `busy_s` is the union of kernels, copies and fills.
    Idle time (`idle_s`) is that in which none of them runs, on any stream of the device, by the kernel that ends it:
    `host_wait_s` until that kernel was launched and could start, `queued_gap_s` where it lay in the queue and followed
    within `KERNEL_GAP_NS`, `other_idle_s` all else: it waited for another stream, a copy or another rank, or has no
    launch in the trace. `comm_s` is the union of communication kernels, `comm_overlapped_s` how much of it ran beside
    kernels that compute (neither communication nor copies), `comm_exposed_s` the rest.

    `queued_gaps` is the number of gaps in `queued_gap_s`. `pauses` are all other idle times, a row each: `device`,
    `start_ns` and `end_ns`, `waited_ns` up to when it waited for the host, and the kernels `before` and `after`, as
    indexes of the trace's, NONE behind the last.

    Of `phases` alone: `host_s` is the host's time in the phase under the profiler. `launches` are calls of the host,
    from one to the next the median is `launch_interval_s`; `kernels` have the median duration `median_kernel_s`.

    Of `devices` alone: `kernel_span_s` is from the start of its first kernel to the end of its last, which leaves out
    what the host does in the first step before and in the last behind.

    `is_whole_trace`: the steps are not known to the moment, and the clocks run over all that was traced, what lies
    outside of phases included.
    """

    phases: pd.DataFrame
    devices: pd.DataFrame
    pauses: pd.DataFrame
    steps: int
    skipped: int
    is_whole_trace: bool

    @property
    def total(self) -> pd.Series:
        """All devices, outside of phases, too."""
        return self.devices.sum()


def phase_clocks(kernels: pd.DataFrame, events: TraceEvents, timeline: PhaseTimeline) -> Clocks:
    """Clocks of every phase that the host was in or that has kernels.

    Each moment of each device belongs to one phase. Where kernels run it is that of their launch; of several phases'
    at once, that of what computes before that of a copy or of communication, and of those the one that the host was in
    first: a copy for the next step beside a backward pass does not end it, and a collective that still runs beside the
    optimizer does not lengthen it. Idle time belongs to the phase whose kernel ends it, with two exceptions: the device
    waits in the phase that the host is in then, and a gap between queued kernels belongs to the one before, as it does
    by events on the stream. A kernel without a launch is of no phase: it has `unlinked` for itself, unless
    another runs beside it.

    The clock runs over the steps, of lmbench's without the first of several: the recording starts on an idle device,
    where the host first has to get ahead. Where kernels were queued before, it runs from the first to the last that the
    steps launched. Without steps it runs over the whole trace.
    """
    is_whole = not len(timeline.step_ns)
    skipped = int(timeline.source == "lmbench" and 1 < len(timeline.step_ns) == timeline.steps)
    steps = timeline.steps - skipped
    if kernels.empty:
        return Clocks(pd.DataFrame(), pd.DataFrame(), pd.DataFrame(), steps, skipped, is_whole)
    # Kernels of other launches behind the last of the steps do not matter.
    counted = kernels[kernels.is_counted]
    kernels = kernels[kernels.is_counted | (kernels.start_ns < counted.end_ns.max())]
    queue = _queue(kernels, events.launches)
    ranges = np.concatenate((timeline.start_ns, timeline.end_ns, timeline.step_ns.ravel()))
    moments = np.concatenate((queue.start_ns, queue.end_ns, ranges))
    # Kernels in a queue start after their launches, and launches can go on after the last kernel.
    first, last = min(moments.min(), queue.begun_ns.min()), max(moments.max(), queue.returned_ns.max()) + 1
    begin_ns, end_ns = int(moments.min()), int(moments.max())
    if not is_whole:
        begin_ns, end_ns = int(timeline.step_ns[skipped, 0]), int(timeline.step_ns[:, 1].max())
    # What the host did when: place k, from one border to the next, is of one phase. Behind these pieces, without a
    # length, are places of kernels without a launch: of those that are clocked, and of those before the clock begins.
    borders = np.unique(np.concatenate(([first, begin_ns, end_ns, last], ranges)))
    phases = [*timeline.at(borders[:-1]), UNLINKED, UNLINKED]
    is_clocked = np.append(is_whole | ((borders[:-1] >= begin_ns) & (borders[:-1] < end_ns)), [True, False])
    place = np.searchsorted(borders, queue.begun_ns, side="right") - 1
    borders = np.append(borders, [last, last])
    if (~kernels.is_counted & (kernels.end_ns > begin_ns)).any():
        begin_ns, end_ns = int(counted.start_ns.min()), int(counted.end_ns.max())
    place = np.where(queue.launch != NONE, place, len(phases) - np.where(queue.start_ns >= begin_ns, 2, 1))
    times, pauses = {}, {}
    for device, rows in kernels.groupby("device", sort=False).indices.items():
        by_place, idle = _device_times(queue[rows], place[rows], borders, (begin_ns, end_ns))
        times[device] = by_place.assign(phase=phases)[is_clocked]
        names = np.append(kernels.index[rows], NONE)
        pauses[device] = idle.assign(before=names[idle.before], after=names[idle.after], device=device)
    clocked = pd.concat(times, names=["device"])
    clocked["window_s"] = clocked[["busy_s", "queued_gap_s", "host_wait_s", "other_idle_s"]].sum(axis=1)
    # The host may have launched for long before the device's clock begins.
    host = {"phase": phases, "host_s": np.diff(np.maximum(borders, begin_ns))}
    by_phase = clocked.groupby("phase").sum().join(pd.DataFrame(host)[is_clocked].groupby("phase").sum())
    sliver_ns = _SLIVER_FRACTION * by_phase.window_s.sum()
    is_sliver = by_phase.index.isin(NO_PHASE) & (by_phase.busy_s == 0) & (by_phase.window_s <= sliver_ns)
    by_phase = by_phase[~is_sliver].reindex([phase for phase in PHASE_ORDER if phase in by_phase.index[~is_sliver]])
    counted = kernels[is_clocked[place]]
    launched = counted[counted.launch != NONE].drop_duplicates("launch").sort_values("launch")
    begun_ns = pd.Series(events.launches.start_ns[launched.launch], launched.index)
    launched = launched.assign(interval_ns=-begun_ns.diff(-1)).groupby("phase")
    by_phase = by_phase.assign(launches=launched.size(), kernels=counted.groupby("phase").size()).fillna(0)
    by_phase = _means(by_phase, steps).assign(
        median_kernel_s=counted.groupby("phase").duration_ns.median() / 1e9,
        launch_interval_s=launched.interval_ns.median() / 1e9,
    )
    spans = counted.groupby("device")
    by_device = clocked.drop(columns="phase").groupby("device").sum()
    by_device = by_device.assign(kernel_span_s=spans.end_ns.max() - spans.start_ns.min()).fillna(0)
    idle = pd.concat(pauses.values(), ignore_index=True)
    return Clocks(by_phase, _means(by_device, steps), idle, steps, skipped, is_whole)


def _means(sums: pd.DataFrame, steps: int) -> pd.DataFrame:
    """Means per step of sums, of which those of time are in ns; with what follows from them."""
    means = sums.apply(lambda column: column / steps / (1e9 if column.name.endswith("_s") else 1))
    idle_s = means.queued_gap_s + means.host_wait_s + means.other_idle_s
    return means.assign(idle_s=idle_s, comm_exposed_s=means.comm_s - means.comm_overlapped_s)


def _queue(kernels: pd.DataFrame, launches: Events) -> Events:
    """Kernels by start. `begun_ns` and `returned_ns` are of the launch, `ready_ns` is when the kernel could start on an
    idle device; `is_next` says that the same launch had a kernel before, as in a CUDA graph: nothing of the host's lies
    between them."""
    queue = kernels[["start_ns", "end_ns", "launch", "kind"]].to_records(index=False)
    start, end, launch, is_linked = queue.start_ns, queue.end_ns, queue.launch, queue.launch != NONE
    # Without a launch nothing says when the host was there; the kernel's own start stands for it where one is needed.
    begun, returned = (
        np.where(is_linked, np.append(ns, 0)[launch], start) for ns in (launches.start_ns, launches.end_ns)
    )
    # The first of each launch, kernels being in the order of their starts.
    is_next = is_linked & kernels.duplicated("launch").to_numpy()
    end_so_far = np.append(start[:1], np.maximum.accumulate(end)[:-1])
    late = (start - returned)[is_linked & ~is_next & (returned > end_so_far)]
    late = late[(late >= 0) & (late <= _LATENCY_NS)]
    latency = np.clip(2 * int(np.median(late)), START_NS, MAX_START_NS) if len(late) else START_NS
    columns = {"begun_ns": begun, "returned_ns": returned, "ready_ns": returned + latency, "is_next": is_next}
    return pd.DataFrame.from_records(queue).assign(**columns).to_records(index=False)


def _device_times(
    queue: Events, place: Integers, borders: Integers, span: tuple[int, int]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One device's times in ns by place, but for the window's, and its pauses. The clock starts at `span[0]`, goes on
    to `span[1]` or longer."""
    places, start, is_linked = len(borders) - 1, queue.start_ns, queue.launch != NONE
    is_comm, is_compute = queue.kind == "comm", ~np.isin(queue.kind, ("comm", "memcpy"))
    # What computes goes before what does not, and what has a launch before what has none; then the earlier piece.
    rank = place + np.select([~is_linked, ~is_compute], [2 * places, places])
    busy_start, busy_end, busy = paint(start, queue.end_ns, rank)
    comm_start, comm_end, comm = paint(start[is_comm], queue.end_ns[is_comm], place[is_comm])
    computing = covered(*union(start[is_compute], queue.end_ns[is_compute]))
    # When the device became idle, at the earliest when the clock begins.
    ends = np.maximum.accumulate(queue.end_ns)
    done = np.minimum(np.maximum(np.append(span[0], ends[:-1]), span[0]), start)
    is_queued = is_linked & (queue.is_next | (queue.returned_ns + QUEUED_LEAD_NS <= done))
    # The first kernel of all has none in front.
    is_queued[0] = False
    waited = np.where(is_queued | ~is_linked, done, np.clip(queue.ready_ns, done, start))
    is_short = is_queued & (start - done <= KERNEL_GAP_NS)
    # A gap is of the kernel that ran last.
    latest = np.maximum.accumulate(np.where(queue.end_ns == ends, np.arange(len(start)), 0))
    before = np.append(0, latest[:-1])
    gap_place = np.where(is_linked[before], place[before], place)
    # Up to the launch the device waits for what the host does in the meantime, and then for what it launched.
    launched = np.clip(queue.begun_ns, done, waited)
    until = max(int(ends[-1]), span[1])
    for_host = covered(np.append(done, ends[-1]), np.append(launched, until))
    # Of each piece of time its place and what it adds.
    pieces = {
        "busy_s": (place[busy], busy_end - busy_start),
        "comm_s": (place[is_comm][comm], comm_end - comm_start),
        "comm_overlapped_s": (place[is_comm][comm], computing(comm_end) - computing(comm_start)),
        "queued_gap_s": (gap_place, np.where(is_short, start - done, 0)),
        "queued_gaps": (gap_place, is_short & (start > done)),
        "host_wait_s": (place, waited - launched),
        "other_idle_s": (place, np.where(is_short, 0, start - waited)),
    }
    times = {name: np.bincount(at, added, places).astype(np.int64) for name, (at, added) in pieces.items()}
    times["host_wait_s"] += np.diff(for_host(borders))
    pauses = {
        "start_ns": np.append(done, ends[-1]),
        "waited_ns": np.append(waited, until),
        "end_ns": np.append(start, until),
        "before": np.append(NONE, latest),
        "after": np.append(np.arange(len(start)), NONE),
    }
    is_pause = np.append((start > done) & ~is_short, until > ends[-1])
    return pd.DataFrame(times), pd.DataFrame(pauses)[is_pause]
