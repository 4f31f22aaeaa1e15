"""The answer of `lmbench kernels --path` and `--what_if`: what sets the step, and what would change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from pathlib import Path

import numpy as np
import pandas as pd

from lmbench.errors import UsageError
from lmbench.kernels.fused import fused_trace
from lmbench.kernels.graph import Graph, build_graph
from lmbench.kernels.matching import load_traces
from lmbench.kernels.names import short_name
from lmbench.kernels.pieces import LAUNCHING, UNEXPLAINED, places
from lmbench.kernels.what_if import GraphChange, WhatIf, checked_fraction, read_changes
from lmbench.records.examined import WHAT_IFS
from lmbench.records.intervals import covered, union
from lmbench.report.answer import Answer, Line, Table
from lmbench.report.described import table
from lmbench.report.units import milliseconds, percent

# Lines name causes, phases and parts from this share of the step on, and the two that limit a step with changes.
_LARGE_FRACTION, _TOP_LIMITS = 0.02, 2
_UNKNOWN = (
    "not simulated: a clock that rises as work falls, streams that share the memory's bandwidth, and a host whose pace "
    "differs from run to run"
)


def path_answer(sources: Sequence[str | Path], what_if: str | None = None) -> Answer:
    """The critical path of one trace or of those of several ranks, and the step with changes.

    Args:
        sources: as for `ranks_answer`.
        what_if: changes, as `read_changes` takes them; None for the usual ones that the trace has something of.

    Raises:
        UsageError: a source cannot be read, or a change is none or changes nothing in these traces.
    """
    changes = read_changes(what_if) if what_if is not None else None
    graph = build_graph(load_traces(sources))
    simulation = WhatIf(graph)
    shown = _late_pieces(graph).assign(s=lambda rows: rows.ns / 1e9 / graph.steps)
    step_s, count = simulation.traced_s, len(graph.traces)
    sums = {axis: shown.groupby(axis).s.sum().sort_values(ascending=False) for axis in ("cause", "phase", "part")}
    ranks = f" over {count} ranks" if count > 1 else ""
    has_steps = any(len(trace.timeline.step_ns) for trace in graph.traces.values())
    per = f"per step{ranks}, of {graph.steps} steps" if has_steps else f"in the whole trace{ranks}"
    headline = [
        Line("path", f"{milliseconds(step_s)} ms {per}: {_listed(sums['cause'], step_s)}"),
        *_launching_lines(simulation, shown),
        Line("by phase", _listed(sums["phase"], step_s)),
        Line("by part", _listed(sums["part"].drop("", errors="ignore"), step_s)),
        *_profiler_lines(simulation),
        *(_slack_lines(simulation) if changes is None else []),
    ]
    what_ifs = _what_if_table(simulation, changes)
    causes = shown.groupby(["cause", "phase"]).s.sum().unstack(fill_value=0.0).add_suffix("_s")
    causes = causes.assign(step_s=sums["cause"], share_fraction=sums["cause"] / step_s).sort_values(
        "step_s", ascending=False
    )
    per = "per step, on the chain that sets the step"
    path = table("kernels/axes", causes.reset_index(), name="path", title="The path", axis="cause", per=per)
    tables = [path, _link_table(simulation, shown)]
    if what_ifs.rows:
        tables = [what_ifs, *tables]
    residual = (
        f"the graph without a change, simulated until it is steady, differs by {simulation.residual_fraction:+.1%}"
    )
    unexplained_s = sums["cause"].get(UNEXPLAINED, 0.0)
    notes = [
        Line("checked", f"{residual}; {milliseconds(unexplained_s)} ms of the path have no cause in the trace"),
        Line("", _UNKNOWN),
    ]
    figures = {
        "step_s": step_s,
        "unprofiled_step_s": simulation.step_s,
        "residual_fraction": simulation.residual_fraction,
        "path": sums["cause"].to_dict(),
    }
    return Answer(
        [*headline, *notes], tables, figures=figures, first=("what_if",), trace=lambda: fused_trace(graph, shown)
    )


def _listed(sums: pd.Series, step_s: float) -> str:
    large = sums[sums >= _LARGE_FRACTION * step_s]
    return ", ".join(f"{name} {milliseconds(time_s)} ms" for name, time_s in large.items()) or "-"


def _late_pieces(graph: Graph) -> pd.DataFrame:
    """The pieces of the critical path, in which the time that other ranks waited has the cause `waiting for rank N`.

    That is the last rank's time before a collective, from when the lower half of the others had come.
    """
    path, joins = graph.path, graph.links[graph.links.kind == "join"]
    on_path = graph.links.target[[link for link, *_ in graph.measured.path]]
    # The links of a moment are in the order of their sources.
    joins = joins[joins.target.isin(on_path)]
    arrivals = pd.Series(graph.time_ns[joins.source]).groupby(joins.target.to_numpy())
    start_ns = arrivals.agg(lambda others: others.iloc[max(len(others) - 2, 0) // 2]).to_numpy()
    late = covered(*union(start_ns, arrivals.max().to_numpy()))
    begin_ns = path.start_ns.to_numpy(np.int64)
    late_ns = late(begin_ns + path.ns.to_numpy(np.int64)) - late(begin_ns)
    waiting = path.assign(
        start_ns=path.start_ns + path.ns - late_ns, ns=late_ns, cause="waiting for rank " + path["rank"].astype(str)
    )
    rows = pd.concat([path.assign(ns=path.ns - late_ns), waiting], ignore_index=True)
    return rows[rows.ns > 0]


def _launching_lines(simulation: WhatIf, pieces: pd.DataFrame) -> Iterator[Line]:
    """A line for the call after which most of the launching on the path comes: it had waited for the device."""
    graph, path = simulation.graph, simulation.graph.path
    launching = pieces[pieces.cause == LAUNCHING]
    calls = path[path.link == path.after].drop_duplicates("link")
    place_of = (calls.name + " " + places(graph.traces, calls)).str.rstrip().set_axis(calls.link)
    by_place = launching.groupby(launching.after.map(place_of)).s.sum()
    if by_place.max() >= _LARGE_FRACTION * simulation.traced_s:
        after = f"{milliseconds(by_place.max())} of {milliseconds(launching.s.sum())} ms after {by_place.idxmax()}"
        yield Line("", f"launching: {after}")


def _profiler_lines(simulation: WhatIf) -> Iterator[Line]:
    """A line with the step and its chain without what the profiler costs the host, where that is known."""
    if simulation.host_s != simulation.traced_host_s:
        step_s, shares = simulation.ask([])
        host = f"{milliseconds(simulation.host_s)} ms of the host instead of {milliseconds(simulation.traced_host_s)}"
        yield Line("unprofiled", f"{milliseconds(step_s)} ms per step with {host}: {_listed(shares * step_s, step_s)}")


def _slack_lines(simulation: WhatIf) -> Iterator[Line]:
    """A line with the chains that are left if the device, or the host, took no time."""
    pieces = simulation.graph.pieces
    is_comm = pieces.kind[pieces.link_kind == "kernel"] == "comm"
    # What is not there cannot be changed.
    changes = {"collectives=1e-9": is_comm.any(), "device=0": not is_comm.all()}
    chains = {"the host": ",".join(compress(changes, changes.values())), "the device": "host=0"}
    if len(is_comm):
        alone_s = {name: simulation.ask(read_changes(free))[0] for name, free in chains.items()}
        texts = [f"{name} alone {milliseconds(step_s)} ms" for name, step_s in alone_s.items()]
        yield Line("slack", f"the next chains: {', '.join(texts)}")


def _what_if_table(simulation: WhatIf, changes: Sequence[GraphChange] | None) -> Table:
    """Each change alone and all together; without changes the usual ones that the trace has something of."""
    sets = [[change] for change in changes] if changes else [read_changes(words) for words in WHAT_IFS]
    rows = []
    for together in [*sets, *([changes] if changes and len(changes) > 1 else [])]:
        try:
            step_s, shares = simulation.ask(together)
        except UsageError:
            if changes:
                raise
            continue
        checked = checked_fraction(together)
        rows.append({
            "change": ", ".join(change.words for change in together), "step_s": step_s,
            "change_s": step_s - simulation.step_s, "share_fraction": step_s / simulation.step_s - 1,
            "band_s": None if checked is None else max(checked, abs(simulation.residual_fraction)) * step_s,
            "limit": ", ".join(f"{cause} {percent(share)}" for cause, share in shares[:_TOP_LIMITS].items()),
        })  # fmt: skip
    return table("kernels/what_if", pd.DataFrame(rows))


def _link_table(simulation: WhatIf, pieces: pd.DataFrame) -> Table:
    """The longest links of the path, summed by what they are and where: the module, or what the host was in."""
    traces = simulation.graph.traces
    events = zip(pieces["rank"], pieces.around.astype(int), strict=True)
    modules = pd.Series([traces[rank].host.module(event) for rank, event in events], pieces.index, dtype=object)
    under = places(traces, pieces)
    where = under.where(under != "", modules.str.replace(r"\d+", "*", regex=True))
    rows = pieces.assign(where=where, name=[*map(short_name, pieces.name)])
    groups = rows.groupby(["rank", "cause", "phase", "name", "where"]).s
    links = groups.agg(step_s="sum", longest_s="max", count="size").sort_values("step_s", ascending=False)
    links["longest_s"] *= simulation.graph.steps
    return table("kernels/path_links", links.reset_index())
