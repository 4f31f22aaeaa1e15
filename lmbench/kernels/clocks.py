"""The device's time by phase, from the trace alone: busy, idle for one of three reasons, and in communication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from lmbench.kernels.graph import Graph
from lmbench.kernels.pieces import GAPS, LAUNCHING
from lmbench.kernels.trace import NO_PHASE, OUTSIDE, PHASE_ORDER
from lmbench.records.intervals import NONE, Integers, covered, cut, paint, take, union

# `outside` and `unlinked` get no row if they have no kernel and at most this share of the window. Such slivers lie
# between two ranges of the host.
_SLIVER_FRACTION = 0.005
# Kinds of a device's time, as columns of its pieces.
_IDLE = ["queued_gap_ns", "host_wait_ns", "other_idle_ns"]
_TIMES = ["busy_ns", *_IDLE, "comm_ns", "comm_exposed_ns", "rank_wait_ns"]


@dataclass(frozen=True, eq=False)
class Clocks:
    """Time on the devices, as means per clocked step.

    `phases` has a row for each phase, in the order of a step, summed over devices. `devices` has a row for each device,
    by its number in the trace. Columns of both:

    - `window_s`: `busy_s` plus `idle_s`.
    - `busy_s`: union of kernels, copies and fills on all streams of the device.
    - `idle_s`: the rest, by the chain of links that the kernel behind it waited for. `host_wait_s` is the part in which
      the host worked towards the launch, and the launch itself. `queued_gap_s` is the gap before a kernel that was
      queued and followed within `KERNEL_GAP_NS`. `other_idle_s` is all else: the kernel waited for another stream, a
      copy or another rank, or has no launch in the trace.
    - `comm_s`: union of communication kernels.
    - `comm_exposed_s`: the part of `comm_s` in which no kernel computes; communication and copies do not.
    - `rank_wait_s`: the part of `comm_exposed_s` before the last rank came, as far as several ranks' traces tell.

    `phases` alone has `host_s`, the host's time in the phase under the profiler; the number of `launches` and the
    median time from one to the next, `launch_interval_s`; the number of `kernels` and their median duration,
    `median_kernel_s`.

    `wait_pieces` are the pieces of `host_wait_s`, as `chain_pieces` returns them, with the length `pause_ns` of their
    pause.

    `collectives` has a row for each phase and kind of collective: `comm_s`, `comm_exposed_s`, `rank_wait_s`, the number
    of `calls`; and of those whose size is known `message_bytes`, `bus_bytes` and `cost_s`, the time once the last rank
    came.
    """

    phases: pd.DataFrame
    devices: pd.DataFrame
    wait_pieces: pd.DataFrame
    collectives: pd.DataFrame

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
    kernels that were queued before them is left out. Without steps it runs from the first kernel that counts to the
    last.
    """
    trace, steps = graph.first, graph.steps
    kernels, timeline = trace.kernels, trace.timeline
    if kernels.empty:
        nothing = pd.DataFrame()
        return Clocks(nothing, nothing, nothing, nothing)
    # Of kernels that the steps did not launch, leave out those behind the steps' last kernel.
    is_queued = kernels.is_counted | (kernels.start_ns < kernels.end_ns[kernels.is_counted].max())
    queue = kernels[is_queued]
    (span,) = graph.activities[["start_ns", "end_ns"]][graph.activities.kind == "steps"].to_numpy() - trace.shift_ns
    devices = [_busy_and_pauses(rows, span) for _, rows in queue.groupby("device", sort=False)]
    busy, pauses = (pd.concat(frames, ignore_index=True) for frames in zip(*devices, strict=True))
    idle, counted = _idle_pieces(graph, pauses), queue[queue.is_clocked]
    clocked = pd.concat([busy, idle])
    begin, end = trace.clocked_ns
    borders = np.append(timeline.start_ns, timeline.end_ns)
    host_start, host_end, _ = cut(np.array([begin]), np.array([end]), borders)
    host_ns = pd.Series(host_end - host_start).groupby(timeline.at(host_start)).sum()
    return Clocks(
        _phases(clocked, counted, host_ns, steps), _means(clocked, ["device"], steps),
        idle.dropna(subset="host_wait_ns"), _collectives(clocked, counted, steps),
    )  # fmt: skip


def _phases(pieces: pd.DataFrame, kernels: pd.DataFrame, host_ns: pd.Series, steps: int) -> pd.DataFrame:
    """`Clocks.phases`, from the devices' time in pieces, the kernels and the host's time by phase."""
    launched = kernels[kernels.launch != NONE].drop_duplicates("launch").sort_values("launch")
    launched = launched.assign(interval_ns=-launched.launch_ns.diff(-1)).groupby("phase")
    in_phase = kernels.groupby("phase")
    sums = pd.DataFrame({"host_s": host_ns / 1e9, "launches": launched.size(), "kernels": in_phase.size()})
    phases = pd.concat([_means(pieces, ["phase"], steps), sums / steps], axis=1).fillna(0).rename_axis("phase")
    is_sliver = (phases.kernels == 0) & (phases.window_s <= _SLIVER_FRACTION * phases.window_s.sum())
    phases = phases[~(is_sliver & phases.index.isin(NO_PHASE))]
    return phases.reindex([phase for phase in PHASE_ORDER if phase in phases.index]).assign(
        median_kernel_s=in_phase.duration_ns.median() / 1e9,
        launch_interval_s=launched.interval_ns.median() / 1e9,
    )


def _collectives(pieces: pd.DataFrame, kernels: pd.DataFrame, steps: int) -> pd.DataFrame:
    """`Clocks.collectives`: means per step by phase and kind of collective."""
    keys = ["phase", "collective"]
    comm = kernels[kernels.collective != ""]
    cost_s = (comm.duration_ns - comm.wait_ns) / 1e9
    groups = comm.assign(cost_s=cost_s.where(comm.message_bytes.notna())).groupby(keys)
    sums = groups[["message_bytes", "bus_bytes", "cost_s"]].sum(min_count=1).assign(calls=groups.size())
    times = _means(pieces, keys, steps)[["comm_s", "comm_exposed_s", "rank_wait_s"]]
    return (sums / steps).join(times).reset_index()


def _means(pieces: pd.DataFrame, keys: list[str], steps: int) -> pd.DataFrame:
    """Seconds per step of each kind of time by the columns `keys`, with `idle_s` and `window_s`."""
    times = pieces.groupby(keys)[_TIMES].sum()
    times["idle_ns"] = times[_IDLE].sum(axis=1)
    times["window_ns"] = times.busy_ns + times.idle_ns
    return (times / steps / 1e9).rename(columns=lambda name: name.replace("_ns", "_s"))


def _busy_and_pauses(queue: pd.DataFrame, span: Integers) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The time of one device's kernels in pieces, and its pauses, the idle times between them.

    A piece has the columns of `_TIMES` that it counts for, and the `phase`, `collective` and `device` of its kernel. A
    pause has `device`, `start_ns`, `end_ns`, `after`, the index of the kernel that ends it or NONE, and `gap_phase`,
    that of the kernel before. Pauses last from `span[0]` to `span[1]`; each ends with a clocked kernel, or with the
    last one.
    """
    start, end = queue.start_ns.to_numpy(), queue.end_ns.to_numpy()
    position, is_compute = np.arange(len(queue)), ~queue.kind.isin(("comm", "memcpy")).to_numpy()
    # Of kernels at once, one with a launch goes before one without, one that computes before the others, then the
    # earlier launch.
    rank = np.argsort(np.lexsort((queue.launch_ns, ~is_compute, queue.launch == NONE)))

    def owned(members: Integers) -> pd.DataFrame:
        """The time of these kernels in pieces that one kernel each owns, that with the lowest rank."""
        begin, past, owner = paint(start[members], end[members], rank[members])
        of_kernel = queue[["phase", "collective", "is_clocked", "device", "start_ns", "wait_ns"]].iloc[members[owner]]
        return of_kernel.assign(begin_ns=begin, past_ns=past)

    busy, comm = owned(position), owned(np.flatnonzero(queue.kind == "comm"))
    computing = covered(*union(start[is_compute], end[is_compute]))

    def exposed(moments: pd.Series) -> pd.Series:
        """A clock that stands still while something computes: computing hides the communication beside it."""
        return moments - computing(moments)

    last_rank_ns = (comm.start_ns + comm.wait_ns).clip(comm.begin_ns, comm.past_ns)
    pieces = pd.concat([
        busy.assign(busy_ns=busy.past_ns - busy.begin_ns),
        comm.assign(
            comm_ns=comm.past_ns - comm.begin_ns,
            comm_exposed_ns=exposed(comm.past_ns) - exposed(comm.begin_ns),
            rank_wait_ns=exposed(last_rank_ns) - exposed(comm.begin_ns),
        ),
    ])  # fmt: skip
    latest_end = np.maximum.accumulate(end)
    latest = np.maximum.accumulate(np.where(end == latest_end, position, 0))
    pauses = pd.DataFrame({
        # At the earliest when the clock begins.
        "start_ns": np.maximum(np.append(span[0], latest_end), span[0]),
        "end_ns": np.append(start, max(latest_end[-1], span[1])),
        "after": np.append(queue.index, NONE),
        # A gap belongs to the kernel before it.
        "gap_phase": np.append(OUTSIDE, queue.phase.iloc[latest]),
        "device": queue.device.iat[0],
    })[np.append(queue.is_clocked, True)]  # fmt: skip
    return pieces[pieces.is_clocked], pauses[pauses.end_ns > pauses.start_ns]


def _idle_pieces(graph: Graph, pauses: pd.DataFrame) -> pd.DataFrame:
    """The idle time of all devices in pieces, by the chain of links that the kernel behind each pause waited for."""
    trace, activities = graph.first, graph.activities
    pauses = pauses.assign(pause_ns=pauses.end_ns - pauses.start_ns)
    ends = activities[activities.kind.isin(("kernel", "steps"))]
    # The moment at which the kernel starts; at the end there is none, and the steps end.
    moments = 2 * pd.Series(ends.index, ends.kernel)[pauses.after].to_numpy() + (pauses.after == NONE)
    at = zip(moments.tolist(), (pauses.start_ns + trace.shift_ns).tolist(), strict=True)
    pieces = graph.chain_pieces([graph.measured.chain(moment, begin_ns) for moment, begin_ns in at])
    pieces = pieces.join(pauses[["pause_ns", "device", "gap_phase"]], on="chain")
    is_gap, is_host = pieces.cause == GAPS, pieces.thread.notna() | (pieces.cause == LAUNCHING)
    pieces = pieces.assign(
        queued_gap_ns=pieces.ns.where(is_gap),
        host_wait_ns=pieces.ns.where(is_host),
        phase=np.where(is_gap, pieces.gap_phase, pieces.phase),
    )[is_gap | is_host]
    told_ns = pieces.groupby("chain").ns.sum().reindex(pauses.index, fill_value=0)
    rest_ns = pauses.pause_ns - told_ns
    phase = take(trace.kernels.phase, pauses.after.to_numpy(), trace.timeline.at(pauses.start_ns.to_numpy()))
    rest = pd.DataFrame({"other_idle_ns": rest_ns, "phase": phase, "device": pauses.device})
    return pd.concat([pieces, rest[rest_ns > 0]], ignore_index=True)
