"""The device's time by phase, from the trace alone: busy, idle for one of three reasons, and in communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lmbench.kernels.events import take
from lmbench.kernels.trace import NO_PHASE, PHASE_ORDER, PhaseTimeline
from lmbench.records.intervals import NONE, Integers, cut, locate, paint, union

# A kernel was queued if its launch call returned at least this long before the previous kernel ended. An idle device
# starts a kernel 2.3 us after the call returned (H200, CUDA 13; 5th to 95th percentile 1.9 to 2.6 us).
QUEUED_LEAD_NS = 2_000
# An idle device starts a kernel within twice the trace's median latency after its launch call returned. These are the
# limits of that time; a later kernel waits for something other than the host. An idle H200 started none of 24,000
# kernels later than 4.7 us; an MI300 takes 14 to 25 us.
START_NS = 5_000
MAX_START_NS = 50_000
# Longer latencies do not count in the median: such a kernel waited for something.
_LATENCY_NS = 100_000
#: The longest gap between two queued kernels; a longer pause has another reason. An H200 needs 1.1 us between kernels;
#: the longest seen, on H100, MI300 and older GPUs, is 17 us. Holistic Trace Analysis draws the line at the same 30 us
#: (`consecutive_kernel_delay=30`; its documentation says ns, its times are us).
KERNEL_GAP_NS = 30_000
# `outside` and `unlinked` get no row if they have no kernel and at most this share of the window. Such slivers lie
# between two ranges of the host.
_SLIVER_FRACTION = 0.005
_IDLE = ["queued_gap_s", "host_wait_s", "other_idle_s"]
_COMM_TIMES = ["comm_s", "comm_exposed_s", "rank_wait_s"]
_TIMES = ["busy_s", *_IDLE, *_COMM_TIMES]
_PIECE = ("name", "start_ns", "end_ns", "kernel")


@dataclass(frozen=True, eq=False)
class Clocks:
    """Time on the devices, as means per step over `steps` steps.

    `phases` has a row for each phase, in the order of a step, summed over devices. `devices` has a row for each device,
    by its number in the trace. Columns of both:

    - `window_s`: `busy_s` plus `idle_s`.
    - `busy_s`: union of kernels, copies and fills on all streams of the device.
    - `idle_s`: the rest, split into three by the kernel that ends it. `host_wait_s` lasts until that kernel was
      launched and could start. `queued_gap_s` is the gap before a kernel that was queued and followed within
      `KERNEL_GAP_NS`. `other_idle_s` is all else: the kernel waited for another stream, a copy or another rank, or
      has no launch in the trace.
    - `comm_s`: union of communication kernels.
    - `comm_exposed_s`: the part of `comm_s` in which no kernel computes; communication and copies do not.
    - `rank_wait_s`: the part of `comm_exposed_s` before the last rank came, as far as several ranks' traces tell.

    `phases` alone has `host_s`, the host's time in the phase under the profiler; the number of `launches` and the
    median time from one to the next, `launch_interval_s`; the number of `kernels` and their median duration,
    `median_kernel_s`.

    `pauses` has a row for each idle time outside `queued_gap_s`, with `device`, `start_ns` and `end_ns`. Its wait for
    the host ends at `waited_ns`. `before` and `after` are indexes of the kernels around it, or NONE.

    `collectives` has a row for each phase and kind of collective: `comm_s`, `comm_exposed_s`, `rank_wait_s`, the number
    of `calls`; and of those whose size is known `message_bytes`, `bus_bytes` and `cost_s` (see `Trace.kernels`).
    """

    phases: pd.DataFrame
    devices: pd.DataFrame
    pauses: pd.DataFrame
    collectives: pd.DataFrame
    steps: int

    @property
    def total(self) -> pd.Series:
        """The sum over devices; it includes the time outside of phases."""
        return self.devices.sum()


def phase_clocks(kernels: pd.DataFrame, timeline: PhaseTimeline) -> Clocks:
    """Clocks of every phase that the host was in or that has kernels.

    Each moment of each device belongs to one phase. Busy time belongs to the phase that launched the kernel. Where
    kernels of several phases run at once, one that computes goes before a copy or communication, then the earlier
    launch before the later. So a copy for the next step does not end the backward pass beside it. A collective that
    still runs beside the optimizer does not lengthen backward.

    Idle time belongs to the phase of the kernel that ends it, with two exceptions. While the device waits for the
    host's next launch, the time belongs to the phase that the host is in. A gap between queued kernels belongs to the
    kernel before it, as in timings by events on the stream. A kernel without a launch has the phase `unlinked`, unless
    a kernel with a launch runs beside it.

    The clock runs over the steps without the skipped ones, and on to the last kernel that they launched; the time of
    kernels that were queued before them is left out. Without steps it runs over the whole trace; of a foreign trace,
    from its first kernel to its last.
    """
    is_whole = not len(timeline.step_ns)
    steps = timeline.steps - timeline.skipped
    if kernels.empty:
        nothing = pd.DataFrame()
        return Clocks(nothing, nothing, nothing, nothing, steps)
    # Of kernels that the steps did not launch, leave out those behind the steps' last kernel.
    counted = kernels[kernels.is_counted]
    queue = _queue(kernels[kernels.is_counted | (kernels.start_ns < counted.end_ns.max())])
    ranges = np.concatenate((timeline.start_ns, timeline.end_ns, timeline.step_ns.ravel()))
    moments = np.concatenate((queue.start_ns, queue.end_ns, ranges if timeline.source == "lmbench" else []))
    steps_ns = moments if is_whole else timeline.step_ns[timeline.skipped :]
    begin, end = int(steps_ns.min()), int(steps_ns.max())

    def is_in_steps(moments: Any) -> Any:
        return is_whole | (moments >= begin) & (moments < end)

    # A kernel belongs to the step that launched it.
    queue["is_clocked"] = is_in_steps(queue.launch_ns).where(
        queue.launch != NONE, queue.is_counted & (queue.start_ns >= begin)
    )
    pieces, pauses = [], []
    for device, rows in queue.groupby("device", sort=False):
        times, idle = _device_pieces(rows, ranges, (begin, end))
        kernel, moments = times.kernel.to_numpy(), times.start_ns.to_numpy()
        times = times.assign(
            phase=take(rows.phase, kernel, timeline.at(moments)), collective=take(rows.collective, kernel, "")
        )
        pieces.append(times[take(rows.is_clocked, kernel, is_in_steps(moments))].assign(device=device))
        before, after = (take(rows.index, idle[name].to_numpy(), NONE) for name in ("before", "after"))
        pauses.append(idle.assign(before=before, after=after, device=device))
    clocked, counted = pd.concat(pieces), queue[queue.is_clocked]
    host_start, host_end, _ = cut(np.array([begin]), np.array([end]), ranges)
    host_ns = pd.Series(host_end - host_start).groupby(timeline.at(host_start)).sum()
    return Clocks(
        _phases(clocked, counted, host_ns, steps), _means(clocked, "device", steps),
        pd.concat(pauses, ignore_index=True), _collectives(clocked, counted, steps), steps,
    )  # fmt: skip


def _phases(pieces: pd.DataFrame, kernels: pd.DataFrame, host_ns: pd.Series, steps: int) -> pd.DataFrame:
    """`Clocks.phases`, from the devices' time in pieces, the kernels and the host's time by phase."""
    launched = kernels[kernels.launch != NONE].drop_duplicates("launch").sort_values("launch")
    launched = launched.assign(interval_ns=-launched.launch_ns.diff(-1)).groupby("phase")
    in_phase = kernels.groupby("phase")
    sums = pd.DataFrame({"host_s": host_ns / 1e9, "launches": launched.size(), "kernels": in_phase.size()})
    phases = pd.concat([_means(pieces, "phase", steps), sums / steps], axis=1).fillna(0).rename_axis("phase")
    is_sliver = (phases.busy_s == 0) & (phases.window_s <= _SLIVER_FRACTION * phases.window_s.sum())
    phases = phases[~(is_sliver & phases.index.isin(NO_PHASE))]
    return phases.reindex([phase for phase in PHASE_ORDER if phase in phases.index]).assign(
        median_kernel_s=in_phase.duration_ns.median() / 1e9,
        launch_interval_s=launched.interval_ns.median() / 1e9,
    )


def _collectives(pieces: pd.DataFrame, kernels: pd.DataFrame, steps: int) -> pd.DataFrame:
    """`Clocks.collectives`: means per step by phase and kind of collective."""
    keys = ["phase", "collective"]
    comm = kernels[kernels.collective != ""]
    groups = comm.assign(cost_s=(comm.cost_ns / 1e9).where(comm.message_bytes.notna())).groupby(keys)
    sums = groups[["message_bytes", "bus_bytes", "cost_s"]].sum(min_count=1).assign(calls=groups.size())
    times = _means(pieces[pieces.name.isin(_COMM_TIMES)], keys, steps)[_COMM_TIMES]
    return pd.concat([times, sums / steps], axis=1).reset_index()


def _means(pieces: pd.DataFrame, key: str | list[str], steps: int) -> pd.DataFrame:
    """Seconds per step of each kind of time by the columns `key`, with `idle_s` and `window_s`."""
    times = pieces.pivot_table("ns", key, "name", "sum", fill_value=0).reindex(columns=_TIMES, fill_value=0)
    times["idle_s"] = times[_IDLE].sum(axis=1)
    return times.assign(window_s=times.busy_s + times.idle_s) / steps / 1e9


def _queue(kernels: pd.DataFrame) -> pd.DataFrame:
    """The kernels with `ready_ns`, the latest time at which an idle device would have started each, and `is_next`.

    `is_next` marks the second and later kernels of one launch, as in a CUDA graph: the host does nothing between them.
    """
    is_linked, returned_ns = kernels.launch != NONE, kernels.returned_ns
    is_next = is_linked & kernels.duplicated("launch")
    # The median is over launches to an idle device. The first kernel never counts: what ran before it is not known.
    before_ns = kernels.end_ns.cummax().shift(fill_value=kernels.start_ns.iat[0])
    latencies_ns = (kernels.start_ns - returned_ns)[is_linked & ~is_next & (returned_ns > before_ns)]
    latencies_ns = latencies_ns[latencies_ns.between(0, _LATENCY_NS)]
    latency_ns = np.clip(2 * int(latencies_ns.median()), START_NS, MAX_START_NS) if len(latencies_ns) else START_NS
    return kernels.assign(ready_ns=returned_ns + latency_ns, is_next=is_next)


def _device_pieces(queue: pd.DataFrame, ranges: Integers, span: tuple[int, int]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One device's time in pieces, and its pauses, both with kernels as positions in the `queue`.

    Each piece has the `name` of its kind of time and its `kernel`, NONE for time of the phase that the host is in. Such
    time is cut at `ranges`. The clock runs from `span[0]` to `span[1]`, or to the last kernel's end if it is later.
    """
    start, end, launch_start = (queue[name].to_numpy() for name in ("start_ns", "end_ns", "launch_ns"))
    is_linked = queue.launch.to_numpy() != NONE
    position = np.arange(len(queue))
    is_comm, is_compute = (queue.kind == "comm").to_numpy(), ~queue.kind.isin(("comm", "memcpy")).to_numpy()
    # Of kernels at once, one with a launch goes before one without, one that computes before the others, then the
    # earlier launch.
    rank = np.empty_like(position)
    rank[np.lexsort((launch_start, ~is_compute, ~is_linked))] = position
    comm_start, comm_end, owner = paint(start[is_comm], end[is_comm], rank[is_comm])
    comm = position[is_comm][owner]
    computing = union(start[is_compute], end[is_compute])
    cut_start, cut_end, piece = cut(comm_start, comm_end, np.concatenate(computing))
    is_exposed = locate(*computing, cut_start) == NONE
    exposed_start, exposed_end, exposed = cut_start[is_exposed], cut_end[is_exposed], comm[piece[is_exposed]]
    # A collective first waits for the last rank; its cost is the time from then to its end.
    last_rank_ns = end - queue.cost_ns.to_numpy()
    # When the device became idle before each kernel, at the earliest when the clock begins.
    latest_end = np.maximum.accumulate(end)
    idle_start = np.minimum(np.maximum(np.append(span[0], latest_end[:-1]), span[0]), start)
    is_queued = is_linked & (queue.is_next | (queue.returned_ns + QUEUED_LEAD_NS <= idle_start)).to_numpy()
    # No kernel is known to run before the first.
    is_queued[0] = False
    waited = np.where(is_queued | ~is_linked, idle_start, np.clip(queue.ready_ns, idle_start, start))
    clock_end = max(int(latest_end[-1]), span[1])
    idle = pd.DataFrame({
        "start_ns": np.append(idle_start, max(latest_end[-1], span[0])),
        # Up to the launch the device waits for the host's work, then for the launch itself.
        "launch_ns": np.append(np.clip(launch_start, idle_start, waited), clock_end),
        "waited_ns": np.append(waited, clock_end),
        "end_ns": np.append(start, clock_end),
        "before": np.append(NONE, np.maximum.accumulate(np.where(end == latest_end, position, 0))),
        "after": np.append(position, NONE),
        "is_gap": np.append(is_queued & (start - idle_start <= KERNEL_GAP_NS), False),
    })  # fmt: skip
    idle = idle[idle.end_ns > idle.start_ns]
    gaps, pauses = idle[idle.is_gap], idle[~idle.is_gap]
    host_start, host_end, _ = cut(pauses.start_ns.to_numpy(), pauses.launch_ns.to_numpy(), ranges)
    times = [
        ("busy_s", *paint(start, end, rank)),
        ("comm_s", comm_start, comm_end, comm),
        ("comm_exposed_s", exposed_start, exposed_end, exposed),
        ("rank_wait_s", exposed_start, np.minimum(exposed_end, last_rank_ns[exposed]), exposed),
        # A gap belongs to the kernel before it, unless that one has no launch.
        ("queued_gap_s", gaps.start_ns, gaps.end_ns, gaps.before.where(is_linked[gaps.before], gaps.after)),
        ("host_wait_s", pauses.launch_ns, pauses.waited_ns, pauses.after),
        ("host_wait_s", host_start, host_end, NONE),
        ("other_idle_s", pauses.waited_ns, pauses.end_ns, pauses.after),
    ]
    pieces = pd.concat(pd.DataFrame(dict(zip(_PIECE, values, strict=True))) for values in times)
    pieces["ns"] = pieces.end_ns - pieces.start_ns
    return pieces[pieces.ns > 0], pauses
