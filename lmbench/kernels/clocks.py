"""The device's time by phase, from the trace alone: busy, and idle for one of three reasons; and communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lmbench.kernels.trace import NO_PHASE, PHASE_ORDER, PhaseTimeline
from lmbench.records.intervals import NONE, Integers, cut, locate, paint, union

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
_IDLE = ["queued_gap_s", "host_wait_s", "other_idle_s"]
_COMM_TIMES = ["comm_s", "comm_exposed_s", "rank_wait_s"]
_TIMES = ["busy_s", *_IDLE, *_COMM_TIMES]
_PIECE = ("name", "start_ns", "end_ns", "kernel")


@dataclass(frozen=True, eq=False)
class Clocks:
    """Time on the device, as means per step over `steps` steps: `phases`, a frame by phase in
    the order of a step, summed over devices, and `devices`, one by the device's number in the trace.

    Columns of both: `window_s` is the sum of the four behind it. `busy_s` is the union of kernels, copies and fills.
    Idle time (`idle_s`) is that in which none of them runs, on any stream of the device, by the kernel that ends it:
    `host_wait_s` until that kernel was launched and could start, `queued_gap_s` where it lay in the queue and followed
    within `KERNEL_GAP_NS`, `other_idle_s` all else: it waited for another stream, a copy or another rank, or has no
    launch in the trace. `comm_s` is the union of communication kernels, `comm_exposed_s` how much of it ran without a
    kernel beside it that computes (neither communication nor copies), and `rank_wait_s` how much of that before the
    last rank had come, as far as several ranks' traces tell.

    `pauses` are the idle times that are not in `queued_gap_s`, a row each: `device`, `start_ns` and `end_ns`,
    `waited_ns` up to when it waited for the host, and the kernels `before` and `after`, as indexes of the trace's, NONE
    behind the last.

    `collectives` are by phase and kind of collective: `comm_s`, `comm_exposed_s`, `rank_wait_s` and their number,
    `calls`; of those whose size is known `message_bytes`, `bus_bytes` and `cost_s`, see `describe`.

    Of `phases` alone: `host_s` is the host's time in the phase under the profiler. `launches` are calls of the host,
    from one to the next the median is `launch_interval_s`; `kernels` have the median duration `median_kernel_s`.
    """

    phases: pd.DataFrame
    devices: pd.DataFrame
    pauses: pd.DataFrame
    collectives: pd.DataFrame
    steps: int

    @property
    def total(self) -> pd.Series:
        """All devices, outside of phases, too."""
        return self.devices.sum()


def phase_clocks(kernels: pd.DataFrame, timeline: PhaseTimeline) -> Clocks:
    """Clocks of every phase that the host was in or that has kernels.

    Each moment of each device belongs to one phase. Where kernels run it is that of their launch; of several phases'
    at once, that of what computes before that of a copy or of communication, and of those the one that the host was in
    first: a copy for the next step beside a backward pass does not end it, and a collective that still runs beside the
    optimizer does not lengthen it. Idle time belongs to the phase whose kernel ends it, with two exceptions: the device
    waits in the phase that the host is in then, and a gap between queued kernels belongs to the one before, as it does
    by events on the stream. A kernel without a launch is of no phase: it has `unlinked` for itself, unless
    another runs beside it.

    The clock runs over the steps but those that are skipped. Where kernels were queued before, it runs from the first
    to the last that the steps launched. Without steps it runs over the whole trace, of a foreign one from its first
    kernel to its last.
    """
    is_whole = not len(timeline.step_ns)
    steps = timeline.steps - timeline.skipped
    if kernels.empty:
        nothing = pd.DataFrame()
        return Clocks(nothing, nothing, nothing, nothing, steps)
    # Kernels of other launches behind the last of the steps do not matter.
    counted = kernels[kernels.is_counted]
    queue = _queue(kernels[kernels.is_counted | (kernels.start_ns < counted.end_ns.max())])
    ranges = np.concatenate((timeline.start_ns, timeline.end_ns, timeline.step_ns.ravel()))
    moments = np.concatenate((queue.start_ns, queue.end_ns, ranges if timeline.source == "lmbench" else []))
    steps_ns = moments if is_whole else timeline.step_ns[timeline.skipped :]
    begin, end = first, last = int(steps_ns.min()), int(steps_ns.max())
    if (~queue.is_counted & (queue.end_ns > begin)).any():
        first, last = int(counted.start_ns.min()), int(counted.end_ns.max())

    def is_in_steps(moments: Any) -> Any:
        return is_whole | (moments >= begin) & (moments < end)

    # A kernel is of the step that launched it.
    queue["is_clocked"] = is_in_steps(queue.launch_ns).where(queue.launch != NONE, queue.start_ns >= first)
    pieces, pauses = [], []
    for device, rows in queue.groupby("device", sort=False):
        times, idle = _device_pieces(rows, ranges, (first, last))
        owner, names = times.kernel, np.append(rows.index, NONE)
        is_host = owner == NONE
        times["phase"] = np.where(is_host, timeline.at(times.start_ns.to_numpy()), rows.phase.to_numpy()[owner])
        times["collective"] = rows.collective.to_numpy()[owner]
        is_clocked = np.where(is_host, is_in_steps(times.start_ns), rows.is_clocked.to_numpy()[owner])
        pieces.append(times[is_clocked].assign(device=device))
        pauses.append(idle.assign(before=names[idle.before], after=names[idle.after], device=device))
    clocked, counted = pd.concat(pieces), queue[queue.is_clocked]
    launched = counted[counted.launch != NONE].drop_duplicates("launch").sort_values("launch")
    launched = launched.assign(interval_ns=-launched.launch_ns.diff(-1)).groupby("phase")
    # The host may have launched for long before the device's clock begins.
    begun, ended, _ = cut(np.array([first]), np.array([end]), ranges)
    host_ns = pd.Series(ended - begun).groupby(timeline.at(begun)).sum()
    in_phase = counted.groupby("phase")
    numbers = {"host_s": host_ns / 1e9, "launches": launched.size(), "kernels": in_phase.size()}
    by_phase = (
        pd.concat([_means(clocked, "phase", steps), pd.DataFrame(numbers) / steps], axis=1)
        .fillna(0)
        .rename_axis("phase")
    )
    is_sliver = (by_phase.busy_s == 0) & (by_phase.window_s <= _SLIVER_FRACTION * by_phase.window_s.sum())
    kept = by_phase.index[~(is_sliver & by_phase.index.isin(NO_PHASE))]
    by_phase = by_phase.reindex([phase for phase in PHASE_ORDER if phase in kept]).assign(
        median_kernel_s=in_phase.duration_ns.median() / 1e9,
        launch_interval_s=launched.interval_ns.median() / 1e9,
    )
    return Clocks(
        by_phase, _means(clocked, "device", steps), pd.concat(pauses, ignore_index=True),
        _collectives(clocked, counted, steps), steps,
    )  # fmt: skip


def _collectives(pieces: pd.DataFrame, kernels: pd.DataFrame, steps: int) -> pd.DataFrame:
    """Means per step by phase and kind of collective."""
    keys, comm = ["phase", "collective"], kernels[kernels.collective != ""]
    sizes = comm.assign(cost_s=(comm.cost_ns / 1e9).where(comm.message_bytes.notna())).groupby(keys)[
        ["message_bytes", "bus_bytes", "cost_s"]
    ]
    numbers = sizes.sum(min_count=1).assign(calls=sizes.size())
    times = _means(pieces[pieces.name.isin(_COMM_TIMES)], keys, steps)[_COMM_TIMES]
    return pd.concat([times, numbers / steps], axis=1).reset_index()


def _means(pieces: pd.DataFrame, key: str | list[str], steps: int) -> pd.DataFrame:
    """Seconds per step by phase or by device, and what follows from them."""
    times = pieces.pivot_table("ns", key, "name", "sum", fill_value=0).reindex(columns=_TIMES, fill_value=0)
    times["idle_s"] = times[_IDLE].sum(axis=1)
    return times.assign(window_s=times.busy_s + times.idle_s) / steps / 1e9


def _queue(kernels: pd.DataFrame) -> pd.DataFrame:
    """Kernels with when they could start on an idle device, `ready_ns`; `is_next` says that the same launch had a
    kernel before, as in a CUDA graph: nothing of the host's lies between them."""
    is_linked, returned_ns = kernels.launch != NONE, kernels.returned_ns
    is_next = is_linked & kernels.duplicated("launch")
    # Without one in front, the first of all was not started by its launch.
    before_ns = kernels.end_ns.cummax().shift(fill_value=kernels.start_ns.iat[0])
    late = (kernels.start_ns - returned_ns)[is_linked & ~is_next & (returned_ns > before_ns)]
    late = late[late.between(0, _LATENCY_NS)]
    latency = np.clip(2 * int(late.median()), START_NS, MAX_START_NS) if len(late) else START_NS
    return kernels.assign(ready_ns=returned_ns + latency, is_next=is_next)


def _device_pieces(queue: pd.DataFrame, ranges: Integers, span: tuple[int, int]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One device's time in pieces, each with the `name` of what it is and the place of its `kernel`, NONE for what is
    of the phase that the host is in; and its pauses. The clock starts at `span[0]`, goes on to `span[1]` or longer;
    what the host does is cut up at `ranges`."""
    start, end, begun = (queue[name].to_numpy() for name in ("start_ns", "end_ns", "launch_ns"))
    is_linked, place = queue.launch.to_numpy() != NONE, np.arange(len(queue))
    is_comm, is_compute = (queue.kind == "comm").to_numpy(), ~queue.kind.isin(("comm", "memcpy")).to_numpy()
    # What computes goes before what does not, and what has a launch before what has none; then the earlier launch.
    rank = np.empty_like(place)
    rank[np.lexsort((begun, ~is_compute, ~is_linked))] = place
    comm_start, comm_end, comm = paint(start[is_comm], end[is_comm], rank[is_comm])
    computing = union(start[is_compute], end[is_compute])
    alone_start, alone_end, alone = cut(comm_start, comm_end, np.concatenate(computing))
    is_alone = locate(*computing, alone_start) == NONE
    exposed_start, exposed_end, exposed = (
        alone_start[is_alone],
        alone_end[is_alone],
        place[is_comm][comm[alone[is_alone]]],
    )
    # At the end of a collective stands what it costs; before that it waits for the last rank.
    come = end - queue.cost_ns.to_numpy()
    # When the device became idle, at the earliest when the clock begins.
    ends = np.maximum.accumulate(end)
    done = np.minimum(np.maximum(np.append(span[0], ends[:-1]), span[0]), start)
    is_queued = is_linked & (queue.is_next | (queue.returned_ns + QUEUED_LEAD_NS <= done)).to_numpy()
    # The first kernel of all has none in front.
    is_queued[0] = False
    waited = np.where(is_queued | ~is_linked, done, np.clip(queue.ready_ns, done, start))
    until = max(int(ends[-1]), span[1])
    idle = pd.DataFrame(
        {
            "start_ns": np.append(done, ends[-1]),
            # Up to the launch the device waits for what the host does in the meantime, and then for what it launched.
            "launch_ns": np.append(np.clip(begun, done, waited), until),
            "waited_ns": np.append(waited, until),
            "end_ns": np.append(start, until),
            "before": np.append(NONE, np.maximum.accumulate(np.where(end == ends, place, 0))),
            "after": np.append(place, NONE),
            "is_gap": np.append(is_queued & (start - done <= KERNEL_GAP_NS), False),
        }
    )
    idle = idle[idle.end_ns > idle.start_ns]
    gaps, pauses = idle[idle.is_gap], idle[~idle.is_gap]
    host_start, host_end, _ = cut(pauses.start_ns.to_numpy(), pauses.launch_ns.to_numpy(), ranges)
    times = [
        ("busy_s", *paint(start, end, rank)),
        ("comm_s", comm_start, comm_end, place[is_comm][comm]),
        ("comm_exposed_s", exposed_start, exposed_end, exposed),
        ("rank_wait_s", exposed_start, np.minimum(exposed_end, come[exposed]), exposed),
        # A gap is of the kernel that ran last.
        ("queued_gap_s", gaps.start_ns, gaps.end_ns, gaps.before.where(is_linked[gaps.before], gaps.after)),
        ("host_wait_s", pauses.launch_ns, pauses.waited_ns, pauses.after),
        ("host_wait_s", host_start, host_end, NONE),
        ("other_idle_s", pauses.waited_ns, pauses.end_ns, pauses.after),
    ]
    pieces = pd.concat(pd.DataFrame(dict(zip(_PIECE, values, strict=True))) for values in times)
    pieces["ns"] = pieces.end_ns - pieces.start_ns
    return pieces[pieces.ns > 0], pauses
