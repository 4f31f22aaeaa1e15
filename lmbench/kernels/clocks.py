"""The device's time by phase, from the trace alone: busy, idle for one of three reasons, and in communication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from lmbench.kernels.events import take
from lmbench.kernels.graph import Graph
from lmbench.kernels.trace import NO_PHASE, PHASE_ORDER
from lmbench.records.intervals import NONE, Integers, cut, locate, paint, union

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


def phase_clocks(graph: Graph) -> Clocks:
    """Clocks of every phase that the host was in or that has kernels, from the graph of one rank.

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
    (trace,) = graph.traces.values()
    kernels, timeline, steps = trace.kernels, trace.timeline, graph.steps
    if kernels.empty:
        nothing = pd.DataFrame()
        return Clocks(nothing, nothing, nothing, nothing, steps)
    starts = graph.starts.droplevel("rank").reindex(kernels.index)
    # Of kernels that the steps did not launch, leave out those behind the steps' last kernel.
    is_queued = kernels.is_counted | (kernels.start_ns < kernels.end_ns[kernels.is_counted].max())
    queue = kernels.assign(
        is_clocked=trace.is_clocked, bound_by=starts.kind,
        unexplained_ns=starts.unexplained_ns.fillna(0).astype(np.int64),
    )[is_queued]  # fmt: skip
    ranges = np.concatenate((timeline.start_ns, timeline.end_ns, timeline.step_ns.ravel()))
    begin, end = trace.clocked_ns
    pieces, pauses = [], []
    for device, rows in queue.groupby("device", sort=False):
        times, idle = _device_pieces(rows, ranges, (begin, end))
        kernel, moments = times.kernel.to_numpy(), times.start_ns.to_numpy()
        times = times.assign(
            phase=take(rows.phase, kernel, timeline.at(moments)), collective=take(rows.collective, kernel, "")
        )
        is_in_steps = (moments >= begin) & (moments < end)
        pieces.append(times[take(rows.is_clocked, kernel, is_in_steps)].assign(device=device))
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
    is_launched, unexplained = (queue.bound_by == "launch").to_numpy(), queue.unexplained_ns.to_numpy()
    is_gap = is_linked & ~is_launched & (unexplained == 0)
    waited = np.where(is_launched, np.maximum(start - unexplained, idle_start), idle_start)
    clock_end = max(int(latest_end[-1]), span[1])
    idle = pd.DataFrame({
        "start_ns": np.append(idle_start, max(latest_end[-1], span[0])),
        # Up to the launch the device waits for the host's work, then for the launch itself.
        "launch_ns": np.append(np.clip(launch_start, idle_start, waited), clock_end),
        "waited_ns": np.append(waited, clock_end),
        "end_ns": np.append(start, clock_end),
        "before": np.append(NONE, np.maximum.accumulate(np.where(end == latest_end, position, 0))),
        "after": np.append(position, NONE),
        "is_gap": np.append(is_gap, False),
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
