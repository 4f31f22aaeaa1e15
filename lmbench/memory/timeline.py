"""A history as a picture over time, what is held by category; and the columns of the peak in a report."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd

from lmbench.memory.attribution import OTHERS
from lmbench.memory.blocks import CATEGORY_LABELS, LASTING, held_bytes
from lmbench.memory.findings import Findings
from lmbench.records.vocabulary import PHASE
from lmbench.report.answer import Chart
from lmbench.report.charts import colour, template
from lmbench.report.columns import Column, beside
from lmbench.report.frame import Frame
from lmbench.report.units import GIB, PERCENT, gib
from lmbench.report.view import Feature

#: A column of the picture is the moment of most memory among as many entries as the next.
MAX_COLUMNS = 480
MAX_BANDS = 200


def memory_chart(title: str, findings: Findings) -> Chart:
    """The chart of a history: phases above, below them what is held by category, told under a pointer."""
    entries, blocks, bands = findings.played.entries, findings.blocks, findings.bands
    count = min(len(entries), MAX_COLUMNS)
    borders = np.linspace(0, len(entries), count + 1).astype(np.int64)
    allocated_bytes = entries["allocated_bytes"].to_numpy()
    moments = np.array([a + np.argmax(allocated_bytes[a:b]) for a, b in pairwise(borders)])
    times_ms = ((entries["time_us"].iloc[moments] - entries["time_us"].iloc[0]) / 1e3).round(2).tolist()
    sizes = {name: held_bytes(same, len(entries)) for name, same in blocks.groupby("category")}
    held = pd.DataFrame({CATEGORY_LABELS[name]: sizes[name] for name in LASTING if name in sizes})
    names = list(held)
    held = held.assign(allocated=allocated_bytes, reserved=entries["reserved_bytes"]).iloc[moments] / 2**30
    peak, top = int(np.searchsorted(borders, findings.peak["entry"], side="right") - 1), float(held.max(axis=None))
    held = held.assign(start=range(count), end=range(1, count + 1), ms=times_ms)
    # A stranger's own ranges tell more than the phases of its stacks.
    pieces = (findings.notes is None and bands[OTHERS].pieces) or bands[PHASE].pieces
    ranges = np.searchsorted(entries["time_us"], [edges for _, *edges in pieces])
    ranges = np.clip(np.searchsorted(borders, ranges, side="right") - 1, 0, count).tolist()
    spans = [(name, start, end) for (name, *_), (start, end) in zip(pieces, ranges, strict=True) if end > start]
    phases = pd.DataFrame(spans[:MAX_BANDS], columns=["name", "start", "end"]).assign(low=1.03 * top, high=1.1 * top)
    spec = template("timeline")
    areas, _, peak_rule, pointer, above = spec["layer"]
    # The last column, too, has a width.
    rows = [*held.to_dict("records"), {**held.iloc[-1].to_dict(), "start": count}]
    spec |= {"data": {"values": rows}, "usermeta": {"zoom": {"signal": "zoom_start", "start": 0, "end": count}}}
    spec["encoding"]["x"]["axis"]["labelExpr"] = f"{times_ms}[datum.value]"
    for axis, end in (("x", count), ("y", 1.1 * top)):
        spec["encoding"][axis]["scale"] = {"domain": [0, end], "nice": False}
    place = {"calculate": f"indexof({names}, datum.name)", "as": "place"}
    areas["transform"] = [{"fold": names, "as": ["name", "size"]}, place]
    peak_rule["data"], above["data"] = {"values": [{"start": peak + 0.5}]}, {"values": phases.to_dict("records")}
    pointer["encoding"]["tooltip"] = [
        {"field": name, "type": "quantitative", "format": ".2f" if name == "ms" else ".3f"}
        for name in ("ms", "allocated", "reserved", *names)
    ]
    for layer, words in ((areas, names), (above, list(dict.fromkeys(phases["name"])))):
        layer["encoding"]["color"]["scale"] = {"domain": words, "range": list(map(colour, words))}
    cuts = f"Not complete: {'; '.join(findings.cuts)}. " if findings.cuts else ""
    return Chart(
        title, spec,
        f"{cuts}{len(entries):,} entries of the allocator's history, from left to right; each column shows its moment "
        f"of most memory; the dashed line is what was reserved. The peak, {gib(findings.peak['allocated_bytes'])}, is "
        "marked. The snapshot opens in pytorch.org/memory_viz, which shows each block with its stack.",
    )  # fmt: skip


def _no_history(frame: Frame, cell: int) -> list[str]:
    """Why runs of a cell have no history to show, or a cut one, each reason once."""
    histories = [run.record.memory_history for run in frame.runs_of(cell, is_shown=None)]
    reasons = [f"no history: {history.reason}" for history in histories if history and history.reason]
    is_cut = any(history and history.is_complete is False for history in histories)
    return [*dict.fromkeys(reasons), *(["the history is not complete"] if is_cut else [])]


MEMORY = Feature(
    columns=(
        Column("predicted_peak_bytes", "predicted", beside("memory_prediction.peak_allocated_bytes"), GIB, None),
        Column("prediction_error_fraction", "error", beside("memory_prediction.error_fraction"), PERCENT, None),
        Column("history_peak_bytes", "history's peak", beside("memory_history.peak_allocated_bytes"), GIB, None),
        *(
            Column(f"peak_{name}_bytes", title, beside(f"memory_history.categories.{name}_bytes"), GIB, None)
            for name, title in CATEGORY_LABELS.items()
        ),
    ),
    row_notes=_no_history,
)
