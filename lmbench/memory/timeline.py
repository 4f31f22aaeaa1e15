"""A history as a picture over time: what is held by category, and the blocks that make most of it; and the columns of
the peak in a report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pandas as pd

from lmbench.memory.attribution import OTHERS, frame_lines
from lmbench.memory.blocks import CATEGORIES, CATEGORY_LABELS, Category, held_bytes
from lmbench.memory.findings import Findings
from lmbench.records.intervals import Integers
from lmbench.records.schema import value_at
from lmbench.records.vocabulary import PHASE
from lmbench.report.answer import Chart, Spec
from lmbench.report.charts import colour, template
from lmbench.report.columns import Column, per_cell
from lmbench.report.frame import Frame
from lmbench.report.units import GIB, PERCENT, Unit, gib
from lmbench.report.view import Feature

#: A column of the picture is the moment of most memory among as many entries as the next.
MAX_COLUMNS = 480
#: Blocks that tell what they are: those with most memory times columns.
MAX_BLOCKS = 600
MAX_FRAMES = 12
MAX_BANDS = 200

#: From the bottom of the stack: what stays, then what comes and goes.
STACKED: tuple[Category, ...] = (
    "parameters", "optimizer_state", "gradients", "inputs", "workspaces", "unknown", "activations", "logits",
    "temporaries",
)  # fmt: skip


def memory_chart(title: str, findings: Findings) -> Chart:
    """The chart of a history: phases above, below them what is held, each large block by itself."""
    entries, blocks, bands = findings.played.entries, findings.blocks, findings.bands
    borders = np.linspace(0, len(entries), min(len(entries), MAX_COLUMNS) + 1).astype(np.int64)
    allocated_bytes = entries["allocated_bytes"].to_numpy()
    moments = np.array([a + np.argmax(allocated_bytes[a:b]) for a, b in pairwise(borders)])
    count, shown = len(moments), entries.iloc[moments]
    held, reserved = allocated_bytes[moments], shown["reserved_bytes"].tolist()
    top = max(*reserved, *held) / 2**30
    times_ms = ((shown["time_us"] - entries["time_us"].iloc[0]) / 1e3).round(2).tolist()
    hover = pd.DataFrame({
        "name": "", "start": range(count), "end": range(1, count + 1), "low": 0, "high": top, "opacity": 0,
        "time": [f"{time_ms:.2f} ms" for time_ms in times_ms],
        "held": [f"{gib(size)} of {gib(most)} reserved" for size, most in zip(held, reserved, strict=True)],
    })  # fmt: skip
    sizes = {name: held_bytes(same, len(entries))[moments] for name, same in blocks.groupby("category")}
    categories = [name for name in STACKED if name in sizes]
    names = [CATEGORY_LABELS[name] for name in categories]
    edges = np.vstack([np.zeros(count, np.int64), *(sizes[name] for name in categories)]).cumsum(axis=0)
    layered = zip(names, edges, edges[1:], strict=False)
    areas = [step for name, low, high in layered for step in _steps(0, low, high, name)]
    # Held at a moment: begun up to its entry, and not ended by it.
    first, last = np.searchsorted(moments, blocks["start"]), np.searchsorted(moments, blocks["end"]) - 1
    chosen = blocks.assign(first=first, last=last, area=(last - first + 1).clip(0) * blocks["size_bytes"])
    chosen = chosen[chosen["area"] > 0].nlargest(MAX_BLOCKS, "area").sort_values("start", kind="stable")
    large = []
    for block in chosen.itertuples():
        # The next block of the category lies on this one.
        floor = edges[categories.index(block.category), block.first : block.last + 1]
        stack = "\n".join(islice(frame_lines(findings.played.stacks[block.stack]), MAX_FRAMES))
        words = {
            "size": gib(block.size_bytes), "part": block.owner, "phase": block.phase or "before",
            "operator": block.operator,
            "stack": stack or "none: made before the history, or by autograd's own thread",
        }  # fmt: skip
        name = CATEGORY_LABELS[block.category]
        large += [{**words, **step} for step in _steps(block.first, floor, floor + block.size_bytes, name)]
        floor += block.size_bytes
    # A stranger's own ranges tell more than the phases of its stacks.
    pieces = (findings.notes is None and bands[OTHERS].pieces) or bands[PHASE].pieces
    ranges = np.searchsorted(entries["time_us"], [edges for _, *edges in pieces])
    ranges = np.clip(np.searchsorted(borders, ranges, side="right") - 1, 0, count).tolist()
    spans = [(name, start, end) for (name, *_), (start, end) in zip(pieces, ranges, strict=True) if end > start]
    above = pd.DataFrame(spans[:MAX_BANDS], columns=["name", "start", "end"]).assign(low=1.03 * top, high=1.1 * top)
    limits = enumerate([*reserved, reserved[-1]])
    look = {"type": "line", "interpolate": "step-after", "strokeDash": [5, 3], "color": "var(--text)", "clip": True}
    peak = int(np.searchsorted(borders, findings.peak["entry"], side="right") - 1)
    lines = [
        {"data": {"values": [{"start": start, "low": size / 2**30} for start, size in limits]}, "mark": look},
        {
            "data": {"values": [{"start": peak + 0.5}]}, "mark": {"type": "rule", "clip": True},
            "encoding": {"y": None},
        },
    ]  # fmt: skip
    block_tips = {
        "size": "block", "name": "category", "part": "part", "phase": "made in", "operator": "saved by",
        "stack": "stack",
    }  # fmt: skip
    layers = [
        _layer(hover, [""], {"time": "time", "held": "held"}),
        _layer(pd.DataFrame(areas), names, {"name": "many small blocks of"}, "held"),
        _layer(pd.DataFrame(large), names, block_tips),
        _layer(above, above["name"], {"name": "phase"}, "phases"),
        *lines,
    ]
    spec = template("timeline")
    x = {"title": "ms, by entries of the history", "tickCount": 6, "labelExpr": f"{times_ms}[datum.value]"}
    for channel, axis, end in (("x", x, count), ("y", {"title": "GiB"}, 1.1 * top)):
        spec["encoding"][channel] |= {"axis": axis, "scale": {"domain": [0, end], "nice": False}}
    layers[0] = {**layers[0], "params": spec.pop("params")}
    spec |= {"height": 320, "layer": layers}
    spec["usermeta"] = {"zoom": {"signal": "zoom_start", "start": 0, "end": count}}
    cuts = f"Not complete: {'; '.join(findings.cuts)}. " if findings.cuts else ""
    return Chart(
        title, spec,
        f"{cuts}{len(entries):,} entries of the allocator's history, from left to right; each column shows its moment "
        f"of most memory; the dashed line is what was reserved. The peak, {gib(held[peak])}, is marked. The snapshot "
        "opens in pytorch.org/memory_viz too.",
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
)
