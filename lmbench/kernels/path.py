"""The critical path over ranks: the chain of host work, launches, kernels and collectives that sets the step."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from lmbench.kernels.events import is_range, take
from lmbench.kernels.graph import HOST_LINKS, KERNEL_LINKS, SYNCHRONIZING, Graph, Solution
from lmbench.kernels.names import NAMES, kind_of
from lmbench.kernels.trace import OUTSIDE, Trace
from lmbench.kernels.waits import DATA, HOST_CODE, LAUNCHING, host_pieces
from lmbench.records.intervals import NONE, covered, union

#: Words for time on the path beside kinds of kernels, collectives and the host's causes.
GAPS, UNEXPLAINED, WAITING = "short gaps", "unexplained", "waiting for rank "
# Links that have one cause, whatever they belong to.
_CAUSES: Final = {"launch": LAUNCHING, "order": GAPS, "wait": GAPS, "return": SYNCHRONIZING, "queue": SYNCHRONIZING,
    "join": UNEXPLAINED, "end": UNEXPLAINED,
}  # fmt: skip


def host_time(graph: Graph) -> pd.DataFrame:
    """What the host did in all of its links within the steps: the pieces of `host_pieces`, by `interval` = link."""
    links = graph.links
    is_host = links.kind.isin(HOST_LINKS) & graph.moments.is_inside.to_numpy()[links.target] & ~links.is_lapped
    time_ns = graph.moments.time_ns.to_numpy()
    frames = []
    for rank, rows in links[is_host & (links.ns > 0)].groupby("rank"):
        trace, calls = graph.traces[rank], graph.calls[rank]
        intervals = pd.DataFrame({
            "start_ns": time_ns[rows.target] - rows.ns - trace.shift_ns,
            "end_ns": time_ns[rows.target] - trace.shift_ns,
            "thread": calls.thread.to_numpy()[rows.owner], "device": 0,
        }, rows.index)  # fmt: skip
        pieces = host_pieces(trace, intervals).rename(columns={"call": "name"}).assign(rank=rank, kind="", part="")
        frames.append(pieces if len(trace.kernels) else _computing(trace, pieces))
    return pd.concat(frames, ignore_index=True)


def _computing(trace: Trace, pieces: pd.DataFrame) -> pd.DataFrame:
    """Pieces of a trace of a CPU, on which operators compute: with `kind` and `part`, and the kind as `cause`."""
    around = trace.host.nesting.around(pieces.thread.to_numpy(), pieces.start_ns.to_numpy())
    is_operator = ~take(is_range(trace.host.events), around, True) & (pieces.cause != DATA).to_numpy()
    names = take(trace.host.names, around, "")
    kinds = np.where(is_operator, [kind_of("", operator=name) for name in names], "")
    parts = [
        NAMES.phase_parts.get(phase) or trace.host.part(event) or ""
        for event, phase in zip(around.tolist(), pieces.phase, strict=True)
    ]
    cause = np.where(is_operator, kinds, np.where(pieces.cause == LAUNCHING, HOST_CODE, pieces.cause))
    return pieces.assign(kind=kinds, part=parts, name=names, cause=cause)


def device_time(graph: Graph) -> pd.DataFrame:
    """The kernel that owns a link, by link: its `rank`, index `kernel`, and columns of `Trace.kernels`."""
    columns = ["name", "kind", "part", "phase", "collective", "bus_bytes", "launch", "around"]
    owned = graph.links[graph.links.kind.isin(KERNEL_LINKS)]
    return pd.concat(
        graph.traces[rank].kernels.loc[rows.owner, columns].set_axis(rows.index).assign(rank=rank, kernel=rows.owner)
        for rank, rows in owned.groupby("rank")
    ) if len(owned) else pd.DataFrame(columns=[*columns, "rank", "kernel"])  # fmt: skip


def link_causes(links: pd.DataFrame, device: pd.DataFrame) -> pd.Series:
    """The cause of each of these links of the device: of a kernel its kind, of a collective `exposed` and its name."""
    links = links[~links.kind.isin(HOST_LINKS)]
    kernels = device.reindex(links.index)
    kind = kernels.kind.where(kernels.kind != "comm", "exposed " + kernels.collective)
    return links.kind.map(_CAUSES).fillna(kind)


def path_pieces(graph: Graph, solution: Solution, host: pd.DataFrame, device: pd.DataFrame) -> pd.DataFrame:
    """The critical path of a solution in pieces of one cause each, from its end back.

    Args:
        graph: the graph.
        solution: measured or simulated times.
        host: the pieces of `host_time`, with the times that they have in this solution.
        device: `device_time`.

    Returns:
        Rows with `rank`, `cause`, `phase`, `part`, `name` (of a kernel or call), `start_ns` and `ns`, which sum to the
        length of the solution; the `link`; for the host's the index `piece` in `host`, for kernels their `around`.
    """
    path = graph.path(solution)
    path = path.assign(ns=path.end_ns - path.start_ns).merge(
        graph.links.drop(columns="ns"), left_on="link", right_index=True
    )[lambda rows: rows.ns > 0]  # fmt: skip
    on_host = path[path.kind.isin(HOST_LINKS)].set_index("link")
    pieces = host.assign(piece=host.index)[host.interval.isin(on_host.index)]
    # A link's time is that of its pieces; the first link of the path may be cut.
    share = on_host.ns / pieces.groupby("interval").ns.sum().reindex(on_host.index)
    shift_ns = pieces["rank"].map({rank: trace.shift_ns for rank, trace in graph.traces.items()})
    pieces = pieces.assign(
        ns=pieces.ns * share.reindex(pieces.interval).to_numpy(), start_ns=pieces.start_ns + shift_ns,
        link=pieces.interval,
    )  # fmt: skip
    others = path[~path.kind.isin(HOST_LINKS)]
    kernels = device.reindex(others.link).set_axis(others.index)
    cause = link_causes(graph.links.loc[others.link], device).set_axis(others.index)
    others = kernels[["phase", "part", "name", "around"]].assign(
        rank=others["rank"], link=others.link, cause=cause, start_ns=others.start_ns,
        ns=others.ns, hidden_ns=np.minimum(others.unexplained_ns, others.ns),
    ).fillna({"phase": OUTSIDE, "part": "", "name": ""})  # fmt: skip
    hidden = others.assign(
        start_ns=others.start_ns + others.ns - others.hidden_ns, ns=others.hidden_ns, cause=UNEXPLAINED
    )
    rows = pd.concat([pieces, others.assign(ns=others.ns - others.hidden_ns), hidden], ignore_index=True)
    columns = ["rank", "cause", "phase", "part", "name", "start_ns", "ns", "piece", "link", "around"]
    return rows[rows.ns > 0].reindex(columns=columns).fillna({"part": "", "piece": NONE, "around": NONE})


def late_pieces(graph: Graph, pieces: pd.DataFrame) -> pd.DataFrame:
    """The pieces of the measured path, in which the time that other ranks waited has the cause `waiting for rank N`.

    That is the last rank's time before a collective, from when the lower half of the others had come.
    """
    links, time_ns = graph.links, graph.moments.time_ns.to_numpy()
    joins = links[links.kind == "join"]
    on_path = joins.target.isin(links.target.to_numpy()[graph.path(graph.measured).link])
    arrivals = (
        pd.DataFrame({"join": joins.target, "ns": time_ns[joins.source]})[on_path].sort_values("ns").groupby("join").ns
    )
    start_ns = arrivals.agg(lambda others: others.iloc[max(len(others) - 2, 0) // 2]).to_numpy()
    late = covered(*union(start_ns, arrivals.max().to_numpy()))
    begin_ns = pieces.start_ns.to_numpy(np.int64)
    late_ns = np.minimum(late(begin_ns + pieces.ns.to_numpy(np.int64)) - late(begin_ns), pieces.ns)
    waiting = pieces.assign(
        start_ns=pieces.start_ns + pieces.ns - late_ns, ns=late_ns, cause=WAITING + pieces["rank"].astype(str)
    )
    rows = pd.concat([pieces.assign(ns=pieces.ns - late_ns), waiting], ignore_index=True)
    return rows[rows.ns > 0]
