"""The chart of a history, held memory by category over time; and the report's columns about peaks of memory."""

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
from lmbench.report.columns import Quantity
from lmbench.report.frame import MeasuredCell
from lmbench.report.units import GIB, PERCENT, gib
from lmbench.report.view import Feature

#: The chart has at most so many columns, each for an equal number of entries: it shows their moment of most memory.
MAX_COLUMNS = 480
#: The chart shows at most so many ranges of phases.
MAX_BANDS = 200


def memory_chart(title: str, findings: Findings) -> Chart:
    """The chart of a history: phases at the top, held memory by category below, and its values under a pointer."""
    entries, blocks, bands = findings.played.entries, findings.blocks, findings.bands
    count = min(len(entries), MAX_COLUMNS)
    # A column has the entries from its border to the next.
    borders = np.linspace(0, len(entries), count + 1).astype(np.int64)
    allocated_bytes = entries["allocated_bytes"].to_numpy()
    moments = np.array([a + np.argmax(allocated_bytes[a:b]) for a, b in pairwise(borders)])
    times_ms = ((entries["time_us"].iloc[moments] - entries["time_us"].iloc[0]) / 1e3).round(2).tolist()
    sizes = {name: held_bytes(members, len(entries)) for name, members in blocks.groupby("category")}
    held = pd.DataFrame({CATEGORY_LABELS[name]: sizes[name] for name in LASTING if name in sizes})
    names = list(held)
    held = held.assign(allocated=allocated_bytes, reserved=entries["reserved_bytes"]).iloc[moments] / 2**30
    peak_column = int(np.searchsorted(borders, findings.peak["entry"], side="right") - 1)
    max_gib = float(held.max(axis=None))
    held = held.assign(start=range(count), end=range(1, count + 1), ms=times_ms)
    # Without lmbench's notes, the program's own ranges tell more than phases that stacks tell.
    pieces = (findings.notes is None and bands[OTHERS].pieces) or bands[PHASE].pieces
    phases = pd.DataFrame(pieces, columns=["name", "start", "end"])
    edges = np.searchsorted(entries["time_us"], phases[["start", "end"]].to_numpy())
    phases[["start", "end"]] = np.clip(np.searchsorted(borders, edges, side="right") - 1, 0, count)
    phases = phases[phases["end"] > phases["start"]].head(MAX_BANDS).assign(low=1.03 * max_gib, high=1.1 * max_gib)
    spec = template("timeline")
    areas, _, peak_rule, pointer, above = spec["layer"]
    # Repeat the last column at the right edge, so that it has a width.
    rows = [*held.to_dict("records"), {**held.iloc[-1].to_dict(), "start": count}]
    spec |= {"data": {"values": rows}, "usermeta": {"zoom": {"signal": "zoom_start", "start": 0, "end": count}}}
    spec["encoding"]["x"]["axis"]["labelExpr"] = f"{times_ms}[datum.value]"
    for axis, end in (("x", count), ("y", 1.1 * max_gib)):
        spec["encoding"][axis]["scale"]["domain"] = [0, end]
    fold, place = areas["transform"]
    fold["fold"], place["calculate"] = names, f"indexof({names}, datum.name)"
    peak_rule["data"] = {"values": [{"start": peak_column + 0.5}]}
    above["data"] = {"values": phases.to_dict("records")}
    pointer["encoding"]["tooltip"] = [
        {"field": name, "type": "quantitative", "format": ".2f" if name == "ms" else ".3f"}
        for name in ("ms", "allocated", "reserved", *names)
    ]
    for layer, domain in ((areas, names), (above, list(dict.fromkeys(phases["name"])))):
        colours = [colour(name, index) for index, name in enumerate(domain, start=1)]
        layer["encoding"]["color"]["scale"] = {"domain": domain, "range": colours}
    cuts = f"Not complete: {'; '.join(findings.cuts)}. " if findings.cuts else ""
    return Chart(
        title, spec,
        f"{cuts}{len(entries):,} entries of the allocator's history, from left to right; each column shows its moment "
        f"of most memory; the dashed line is what was reserved. The peak, {gib(findings.peak['allocated_bytes'])}, is "
        "marked. The snapshot opens in pytorch.org/memory_viz, which shows each block with its stack.",
    )  # fmt: skip


def _no_history(cell: MeasuredCell) -> list[str]:
    """The reasons why runs of a cell have no history, each once. A guard tells that a history is not complete."""
    histories = (run.record.memory_history for run in cell.runs)
    return [*dict.fromkeys(f"no history: {history.reason}" for history in histories if history and history.reason)]


MEMORY = Feature(
    columns=(
        Quantity("predicted_peak_bytes", "predicted", "memory_prediction.peak_allocated_bytes", GIB, None),
        Quantity("prediction_error_fraction", "error", "memory_prediction.error_fraction", PERCENT, None),
        Quantity("history_peak_bytes", "history's peak", "memory_history.peak_allocated_bytes", GIB, None),
        *(
            Quantity(f"peak_{name}_bytes", title, f"memory_history.categories.{name}_bytes", GIB, None)
            for name, title in CATEGORY_LABELS.items()
        ),
    ),
    row_notes=_no_history,
)
