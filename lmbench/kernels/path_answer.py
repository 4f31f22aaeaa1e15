"""The answer of `lmbench kernels --path` and `--what_if`: what sets the step, and what would change it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from lmbench.errors import UsageError
from lmbench.kernels.fused import fused_trace
from lmbench.kernels.matching import graph_of
from lmbench.kernels.names import short_name
from lmbench.kernels.path import UNEXPLAINED, late_pieces
from lmbench.kernels.waits import LAUNCHING, name_places
from lmbench.kernels.what_if import USUAL, GraphChange, WhatIf, checked_fraction, read_changes
from lmbench.records.intervals import NONE
from lmbench.report.answer import Answer, Line, Table
from lmbench.report.described import table
from lmbench.report.units import milliseconds, percent

# Lines name causes, phases and parts from this share of the step on, and the two that limit a step with changes.
_LARGE_FRACTION, _TOP_LIMITS = 0.02, 2
_UNKNOWN = "not simulated: a clock that rises as work falls, and streams that share the memory's bandwidth"


def path_answer(sources: Sequence[str | Path], what_if: str | None = None) -> Answer:
    """The critical path of one trace or of those of several ranks, and the step with changes.

    Args:
        sources: as for `ranks_answer`.
        what_if: changes, as `read_changes` takes them; None for the usual ones that the trace has something of.

    Raises:
        UsageError: a source cannot be read, or a change is none or changes nothing in these traces.
    """
    changes = read_changes(what_if) if what_if is not None else None
    graph = graph_of(sources)
    simulation = WhatIf(graph)
    shown = late_pieces(graph, simulation.pieces).assign(s=lambda rows: rows.ns / 1e9 / graph.steps)
    step_s, count = simulation.measured_s, len(graph.traces)
    sums = {axis: shown.groupby(axis).s.sum().sort_values(ascending=False) for axis in ("cause", "phase", "part")}
    ranks = f" over {count} ranks" if count > 1 else ""
    headline = [
        Line(
            "path",
            f"{milliseconds(step_s)} ms per step{ranks}, of {graph.steps} steps: {_listed(sums['cause'], step_s)}",
        ),
        *_launching_lines(simulation, shown),
        Line("by phase", _listed(sums["phase"], step_s)),
        Line("by part", _listed(sums["part"].drop("", errors="ignore"), step_s)),
        *(_slack_lines(simulation) if changes is None else []),
    ]
    what_ifs = _what_if_table(simulation, changes)
    causes = shown.groupby(["cause", "phase"]).s.sum().unstack(fill_value=0.0).add_suffix("_s")
    causes = causes.assign(step_s=sums["cause"], share_fraction=sums["cause"] / step_s).sort_values(
        "step_s", ascending=False
    )
    tables = [what_ifs, table("kernels/path", causes.reset_index()), _link_table(simulation, shown)]
    residual = (
        f"the graph without a change, simulated until it is steady, differs by {simulation.residual_fraction:+.1%}"
    )
    unexplained_s = sums["cause"].get(UNEXPLAINED, 0.0)
    notes = [
        Line("checked", f"{residual}; {milliseconds(unexplained_s)} ms of the path have no cause in the trace"),
        Line("", _UNKNOWN),
    ]
    figures = {"step_s": step_s, "residual_fraction": simulation.residual_fraction, "path": sums["cause"].to_dict()}
    return Answer(
        [*headline, *notes], tables, figures=figures, first=("what_if",), trace=lambda: fused_trace(graph, shown)
    )


def _listed(sums: pd.Series, step_s: float) -> str:
    large = sums[sums >= _LARGE_FRACTION * step_s]
    return ", ".join(f"{name} {milliseconds(time_s)} ms" for name, time_s in large.items()) or "-"


def _launching_lines(simulation: WhatIf, pieces: pd.DataFrame) -> list[Line]:
    """A line for the synchronize after which most of the launching on the path comes: the device was idle then."""
    graph, after, call = simulation.graph, {}, NONE
    links = graph.links
    path = graph.path(graph.measured).link.to_numpy()[::-1]
    for link, kind in zip(path.tolist(), links.kind.to_numpy()[path], strict=True):
        if kind in ("return", "launch"):
            call = link if kind == "return" else NONE
        after[link] = call
    launching = pieces[pieces.cause == LAUNCHING]
    by_call = launching.groupby(launching.link.map(after)).s.sum()
    by_place = dict[str, float]()
    for link, time_s in by_call.drop(NONE, errors="ignore").items():
        rank, owner = links["rank"][link], links.owner[link]
        row = graph.calls[rank].loc[[owner]].assign(cause="synchronizing", moment=lambda rows: rows.start_ns)
        place = f"{row.name.iat[0]} {name_places(graph.traces[rank], row).under.iat[0]}".rstrip()
        by_place[place] = by_place.get(place, 0.0) + time_s
    if not by_place or max(by_place.values()) < _LARGE_FRACTION * simulation.measured_s:
        return []
    place = max(by_place, key=by_place.__getitem__)
    return [
        Line("", f"launching: {milliseconds(by_place[place])} of {milliseconds(launching.s.sum())} ms after {place}")
    ]


def _slack_lines(simulation: WhatIf) -> list[Line]:
    """A line with the chains that are left if the device, or the host, took no time."""
    if simulation.device.empty:
        return []
    has_collectives = (simulation.device.kind == "comm").any()
    chains = {"the host": f"device=0{',collectives=1e-9' if has_collectives else ''}", "the device": "host=0"}
    texts = [f"{name} alone {milliseconds(simulation.ask(read_changes(free))[0])} ms" for name, free in chains.items()]
    return [Line("slack", f"the next chains: {', '.join(texts)}")]


def _what_if_table(simulation: WhatIf, changes: Sequence[GraphChange] | None) -> Table:
    """Each change alone and all together; without changes the usual ones that the trace has something of."""
    sets = [[change] for change in changes] if changes else [read_changes(words) for words in USUAL]
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
            "change_s": step_s - simulation.measured_s, "share_fraction": step_s / simulation.measured_s - 1,
            "band_s": None if checked is None else max(checked, abs(simulation.residual_fraction)) * step_s,
            "limit": ", ".join(f"{cause} {percent(share)}" for cause, share in shares[:_TOP_LIMITS].items()),
        })  # fmt: skip
    return table("kernels/what_if", pd.DataFrame(rows))


def _link_table(simulation: WhatIf, pieces: pd.DataFrame) -> Table:
    """The longest links of the path, summed by what they are and where: the module, or what the host was in."""
    places = []
    for rank, rows in pieces.groupby("rank"):
        trace = simulation.graph.traces[rank]
        is_host = (rows.piece != NONE).to_numpy()
        host = simulation.host.loc[rows.piece[is_host].astype(int)]
        around = rows.around.to_numpy(np.int64, copy=True)
        around[is_host] = trace.host.nesting.around(host.thread.to_numpy(), host.start_ns.to_numpy())
        modules = {event: re.sub(r"\d+", "*", trace.host.module(event)) for event in set(around.tolist())}
        places.append(pd.Series([modules[event] for event in around.tolist()], rows.index))
        under = pd.Series(name_places(trace, host).under.to_numpy(), rows.index[is_host])
        places[-1].update(under[under != ""])
    rows = pieces.assign(where=pd.concat(places), name=[*map(short_name, pieces.name)])
    groups = rows.groupby(["rank", "cause", "phase", "name", "where"]).s
    links = groups.agg(step_s="sum", longest_s="max", count="size").sort_values("step_s", ascending=False)
    links["longest_s"] *= simulation.graph.steps
    return table("kernels/path_links", links.reset_index())
