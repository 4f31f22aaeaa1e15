"""A history over time: what is held by category, and the blocks that make most of it; in a small file of its own, so
that a page never has to read the snapshot, as a chart, and beside columns of the peak in a report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from msgspec import Meta, Struct
from msgspec.structs import asdict

from lmbench.memory.attribution import OTHERS, frame_lines
from lmbench.memory.blocks import CATEGORIES, CATEGORY_LABELS, Category, held_bytes
from lmbench.records.codec import read_packed, write_packed
from lmbench.records.intervals import Integers
from lmbench.records.measured import Guard, MemoryHistoryRecord
from lmbench.records.schema import value_at
from lmbench.records.vocabulary import PHASE
from lmbench.report.answer import Chart, Spec
from lmbench.report.charts import colour, rows_of, template
from lmbench.report.columns import Column, per_cell
from lmbench.report.frame import Frame
from lmbench.report.units import GIB, PERCENT, Unit, gib
from lmbench.report.view import Feature

TIMELINE_FILE = "memory_timeline.json.gz"
#: A column of the picture is the moment of most memory among as many entries as the next.
MAX_COLUMNS = 480
#: Blocks that can be asked what they are: those with most memory times columns.
MAX_BLOCKS = 600
MAX_FRAMES = 12
MAX_BANDS = 200
#: Timelines of a whole page.
_MOST_CHARTS = 8

#: From the bottom of the stack: what stays, then what comes and goes.
STACKED: tuple[Category, ...] = (
    "parameters", "optimizer_state", "gradients", "inputs", "workspaces", "unknown", "activations", "logits",
    "temporaries",
)  # fmt: skip

_Place = Annotated[int, Meta(ge=0)]


class TimelineBlock(Struct):
    """A block that is held from column `first` to column `last`. `phase` is that in which it was made, `operator` what
    saved it for the backward, `stack` the frames that made it, a line each."""

    first: _Place
    last: _Place
    size_bytes: _Place
    category: str
    part: str
    phase: str
    operator: str
    stack: str


class MemoryTimeline(Struct):
    """The history, column by column. `sizes_bytes` has for each category its bytes in every column; `time_us` counts
    from the first entry. Blocks of a category lie upon each other in the order in which they stand here. `bands` are
    phases, or a stranger's ranges: name, the first column, and the column that they end before."""

    schema_version: Literal[2]
    cuts: list[str]
    sizes_bytes: dict[str, list[_Place]]
    reserved_bytes: Annotated[list[_Place], Meta(min_length=1)]
    time_us: list[int]
    peak: _Place
    entry_count: int
    bands: list[tuple[str, _Place, _Place]]
    blocks: list[TimelineBlock]


def memory_timeline(findings: Any) -> MemoryTimeline:
    """The timeline of a history's `Findings`."""
    entries, blocks, bands = findings.played.entries, findings.blocks, findings.bands
    borders = np.linspace(0, len(entries), min(len(entries), MAX_COLUMNS) + 1).astype(np.int64)
    allocated_bytes = entries["allocated_bytes"].to_numpy()
    moments = np.array([a + np.argmax(allocated_bytes[a:b]) for a, b in pairwise(borders)])
    shown = entries.iloc[moments]
    # Held at a moment: begun up to its entry, and not ended by it.
    first, last = np.searchsorted(moments, blocks["start"]), np.searchsorted(moments, blocks["end"]) - 1
    chosen = blocks.assign(first=first, last=last, area=(last - first + 1).clip(0) * blocks["size_bytes"])
    chosen = chosen[chosen["area"] > 0].nlargest(MAX_BLOCKS, "area").sort_values("start", kind="stable")
    frames = ["\n".join(islice(frame_lines(findings.played.stacks[stack]), MAX_FRAMES)) for stack in chosen["stack"]]
    chosen["frames"] = [text or "none: made before the history, or by autograd's own thread" for text in frames]
    chosen = chosen.replace({"category": CATEGORY_LABELS, "phase": {"": "before"}})
    columns = ["first", "last", "size_bytes", "category", "owner", "phase", "operator", "frames"]
    # A stranger's own ranges tell more than the phases of its stacks.
    pieces = (findings.notes is None and bands[OTHERS].pieces) or bands[PHASE].pieces
    edges = np.searchsorted(entries["time_us"], [edges for _, *edges in pieces])
    edges = np.clip(np.searchsorted(borders, edges, side="right") - 1, 0, len(moments)).tolist()
    spans = [(name, start, end) for (name, *_), (start, end) in zip(pieces, edges, strict=True) if end > start]
    sizes = {name: held_bytes(same, len(entries))[moments].tolist() for name, same in blocks.groupby("category")}
    return MemoryTimeline(
        schema_version=2,
        cuts=findings.cuts,
        sizes_bytes={CATEGORY_LABELS[name]: sizes[name] for name in STACKED if name in sizes},
        reserved_bytes=shown["reserved_bytes"].tolist(),
        time_us=(shown["time_us"] - entries["time_us"].iloc[0]).tolist(),
        peak=int(np.searchsorted(borders, findings.peak["entry"], side="right") - 1),
        entry_count=len(entries),
        bands=spans[:MAX_BANDS],
        blocks=[TimelineBlock(*row) for row in chosen[columns].to_numpy().tolist()],
    )


def examine_run(folder: Path) -> tuple[MemoryHistoryRecord, list[Guard]]:
    """The figures of the history in a run's folder and its guards; writes the timeline beside it.

    Raises UsageError for a history that cannot be read, OSError where the timeline cannot be written.
    """
    from lmbench.memory.findings import examine

    findings = examine(folder)
    write_packed(memory_timeline(findings), folder / TIMELINE_FILE)
    return findings.summary, findings.guards


def read_timeline(folder: Path) -> MemoryTimeline:
    """A run's timeline. Raises DamagedRecord, with one line, for a file that cannot be read or is none."""
    return read_packed(folder / TIMELINE_FILE, MemoryTimeline)


def memory_chart(title: str, history: MemoryTimeline) -> Chart:
    """The chart of a history: phases above, below them what is held, each large block by itself.

    Raises ValueError or IndexError where the history's columns do not fit together.
    """
    columns, names = range(len(history.time_us)), list(history.sizes_bytes)
    sizes = np.array([*history.sizes_bytes.values()], np.int64).reshape(len(names), len(columns))
    edges = np.vstack([np.zeros(len(columns), np.int64), sizes.cumsum(axis=0)])
    held, reserved = edges[-1].copy(), history.reserved_bytes
    top = max(*reserved, held.max()) / 2**30
    moments = pd.DataFrame({
        "name": "", "start": columns, "end": range(1, len(columns) + 1), "low": 0, "high": top, "opacity": 0,
        "time": [f"{time_us / 1e3:.2f} ms" for time_us in history.time_us],
        "held": [f"{gib(size)} of {gib(most)} reserved" for size, most in zip(held, reserved, strict=True)],
    })  # fmt: skip
    layered = zip(names, edges, edges[1:], strict=False)
    areas = [step for name, low, high in layered for step in _steps(0, low, high, name)]
    blocks = []
    for block in history.blocks:
        floor = edges[names.index(block.category), block.first : block.last + 1]
        words = {**asdict(block), "size": gib(block.size_bytes)}
        steps = _steps(block.first, floor, floor + block.size_bytes, block.category)
        blocks += [{**words, **step} for step in steps]
        # The next block of the category lies on this one.
        floor += block.size_bytes
    bands = pd.DataFrame(history.bands, columns=["name", "start", "end"]).assign(low=1.03 * top, high=1.1 * top)
    limits = enumerate([*reserved, reserved[-1]])
    look = {"type": "line", "interpolate": "step-after", "strokeDash": [5, 3], "color": "var(--text)", "clip": True}
    lines = [
        {"data": {"values": [{"start": start, "low": size / 2**30} for start, size in limits]}, "mark": look},
        {
            "data": {"values": [{"start": history.peak + 0.5}]}, "mark": {"type": "rule", "clip": True},
            "encoding": {"y": None},
        },
    ]  # fmt: skip
    block_tips = {
        "size": "block", "name": "category", "part": "part", "phase": "made in", "operator": "saved by",
        "stack": "stack",
    }  # fmt: skip
    layers = [
        _layer(moments, [""], {"time": "time", "held": "held"}),
        _layer(pd.DataFrame(areas), names, {"name": "many small blocks of"}, "held"),
        _layer(pd.DataFrame(blocks), names, block_tips),
        _layer(bands, bands["name"], {"name": "phase"}, "phases"),
        *lines,
    ]
    times = [round(time_us / 1e3, 2) for time_us in history.time_us]
    spec = template("timeline")
    x = {"title": "ms, by entries of the history", "tickCount": 6, "labelExpr": f"{times}[datum.value]"}
    for channel, axis, end in (("x", x, len(columns)), ("y", {"title": "GiB"}, 1.1 * top)):
        spec["encoding"][channel] |= {"axis": axis, "scale": {"domain": [0, end], "nice": False}}
    layers[0] = {**layers[0], "params": spec.pop("params")}
    spec |= {"height": 320, "layer": layers}
    spec["usermeta"] = {"zoom": {"signal": "zoom_start", "start": 0, "end": len(columns)}}
    cuts = f"Not complete: {'; '.join(history.cuts)}. " if history.cuts else ""
    return Chart(
        title, spec,
        f"{cuts}{history.entry_count:,} entries of the allocator's history, from left to right; each column shows its "
        "moment of most memory; the dashed line is what was reserved. The peak, "
        f"{gib(held[history.peak])}, is marked. The snapshot opens in pytorch.org/memory_viz too.",
    )  # fmt: skip


def _layer(spans: pd.DataFrame, names: Iterable[str], tips: Mapping[str, str], legend: str | None = None) -> Spec:
    """Spans of a timeline as a layer, with a legend where that has a title.

    Spans have `start` and `end` on the axis of time, `low` and `high` on the other one, `name` (which decides the
    colour; the order of `names` is the legend's), and what a pointer over it shows: the fields of `tips`, each with its
    title. `opacity` is 1 where there is none.
    """
    fields = dict.fromkeys(["start", "end", "low", "high", "name", "opacity", *tips])
    domain, spec = list(dict.fromkeys(names)), template("spans")
    colours = {"scale": {"domain": domain, "range": list(map(colour, domain))}, "legend": legend and {"title": legend}}
    spec["encoding"]["color"] |= colours
    spec["encoding"]["tooltip"] = [{"field": name, "type": "nominal", "title": title} for name, title in tips.items()]
    return {**spec, "data": {"values": spans.reindex(columns=fields).fillna({"opacity": 1}).to_dict("records")}}


def _charts(frame: Frame) -> list[Chart]:
    """A timeline for each cell with a history, as many as a page has room for.

    The caption of a file that is torn or was changed by hand says why it is not drawn.
    """
    charts: list[Chart] = []
    for title, cell in rows_of(frame):
        folders = [run.path for run in frame.runs_of(cell, is_shown=None) if run.record.memory_history]
        drawn = [folder for folder in folders if (folder / TIMELINE_FILE).exists()][:1]
        if drawn and len(charts) == _MOST_CHARTS:
            return [*charts, Chart("More timelines", {}, "They are left out: the page would become too large.")]
        try:
            charts += [memory_chart(title, read_timeline(folder)) for folder in drawn]
        except (ValueError, IndexError, TypeError) as error:
            charts.append(Chart(title, {}, f"Not shown, as the file cannot be used: {error}."))
    return charts


def _steps(first: int, low: Integers, high: Integers, name: str) -> list[dict[str, Any]]:
    """Columns from `first` on in which both edges stay, as spans from a column up to another, with edges in GiB."""
    cuts = np.flatnonzero(np.diff([low, high], prepend=-1).any(axis=0)).tolist()
    return [
        {"name": name, "start": first + a, "end": first + b, "low": low[a] / 2**30, "high": high[a] / 2**30}
        for a, b in pairwise([*cuts, len(low)])
        if high[a] > low[a]
    ]


def _first(name: str, title: str, field: str, unit: Unit = GIB) -> Column:
    """A number of a cell's first run that has it: of a history, which is a run of its own beside those that are timed,
    or of the prediction, which all runs of a configuration share."""
    read = per_cell(lambda run: value_at(run.record, field), is_shown=None, outcome=None)
    return Column(name, title, read, unit, None)


def _no_history(frame: Frame, cell: int) -> list[str]:
    """Why runs of a cell have no history to show, or a cut one, each reason once."""
    histories = [run.record.memory_history for run in frame.runs_of(cell, is_shown=None)]
    reasons = [f"no history: {history.reason}" for history in histories if history and history.reason]
    is_cut = any(history and history.is_complete is False for history in histories)
    return [*dict.fromkeys(reasons), *(["the history is not complete"] if is_cut else [])]


MEMORY = Feature(
    columns=(
        _first("predicted_peak_bytes", "predicted", "memory_prediction.peak_allocated_bytes"),
        _first("prediction_error_fraction", "error", "memory_prediction.error_fraction", PERCENT),
        _first("history_peak_bytes", "history's peak", "memory_history.peak_allocated_bytes"),
        *(
            _first(f"peak_{name}_bytes", CATEGORY_LABELS[name], f"memory_history.categories.{name}_bytes")
            for name in CATEGORIES
        ),
    ),
    row_notes=_no_history,
    charts=_charts,
)
