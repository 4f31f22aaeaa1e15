"""Two peaks of memory side by side, each recorded or predicted: what grew, by category, phase and line."""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd

from lmbench.memory.answer import lines_of
from lmbench.memory.blocks import CATEGORIES, CATEGORY_LABELS
from lmbench.memory.findings import Findings
from lmbench.memory.forecast import Forecast
from lmbench.records.vocabulary import PHASES
from lmbench.report.answer import Answer, Line
from lmbench.report.described import table
from lmbench.report.units import gib

#: A line that changed by less is left out.
_LINE_BYTES = 2**20


class MemoryPeak(NamedTuple):
    """A peak: bytes by category, by phase, and by category and line, each as a series; a prediction has no lines.

    A block without a line counts for its part of the model.
    """

    text: str
    categories: Any
    phases: Any
    lines: Any


def recorded_peak(name: str, findings: Findings) -> MemoryPeak:
    """The peak of a history."""
    held, peak = findings.held, findings.peak
    line = lines_of(held)
    lines = held.assign(line=line.where(line != "", held["owner"])).groupby(["category", "line"])["size_bytes"].sum()
    text = f"{name}: {gib(peak['allocated_bytes'])} in {peak['phase']}, {gib(peak['reserved_bytes'])} reserved"
    return MemoryPeak(text, pd.Series(findings.by_category), findings.phases["peak_bytes"], lines)


def predicted_peak(name: str, forecast: Forecast) -> MemoryPeak:
    """The peak of a prediction."""
    highest = forecast.highest
    phases = pd.Series({peak.phase: peak.total_bytes for peak in forecast.phases})
    sizes = f"{gib(highest.total_bytes)} in {highest.phase}, {gib(forecast.reserved_bytes)} reserved"
    lines = pd.Series([], pd.MultiIndex.from_arrays([[], []], names=["category", "line"]), dtype="int64")
    return MemoryPeak(f"{name}: {sizes}, predicted", pd.Series(highest.peak), phases, lines)


def difference_answer(a: MemoryPeak, b: MemoryPeak) -> Answer:
    """What B holds more or less at its peak than A."""
    categories = _beside(a.categories, b.categories).reindex(CATEGORIES).dropna()
    categories = categories[categories[["a_bytes", "b_bytes"]].any(axis=1)]
    changes = categories["change_bytes"].rename(CATEGORY_LABELS)
    changes = changes[changes != 0].sort_values(key=abs, ascending=False)
    grown = ", ".join(f"{name} {'+' if size > 0 else '-'}{gib(abs(size))}" for name, size in changes[:3].items())
    total = int(categories["change_bytes"].sum())
    words = f"{gib(abs(total))} {'more' if total > 0 else 'less'}" if total else "as much, but of other kinds"
    headline = f"B holds {words}: {grown}" if grown else "no difference"
    categories = categories.rename(CATEGORY_LABELS)
    categories.loc["peak"] = categories.sum()
    phases = _beside(a.phases, b.phases).rename_axis("phase")
    phases = phases.loc[[name for name in PHASES if name in phases.index]]
    lines = _beside(a.lines, b.lines).query(f"abs(change_bytes) >= {_LINE_BYTES}")
    lines = lines.sort_values("change_bytes", key=abs, ascending=False, kind="stable").rename(CATEGORY_LABELS, level=0)
    tables = [
        table("memory/changed_categories", categories.rename_axis("category").reset_index()),
        table("memory/changed_lines", lines.reset_index()),
        table("memory/changed_phases", phases.reset_index()),
    ]
    return Answer(
        headline=[Line("change", headline)],
        tables=[table for table in tables if table.rows],
        notes=[Line("A", a.text), Line("B", b.text)],
        figures={"change_bytes": total},
    )


def _beside(a: Any, b: Any) -> Any:
    """Two series of bytes as `a_bytes` and `b_bytes`, and their `change_bytes`; what one lacks is 0 there."""
    both = pd.DataFrame({"a_bytes": a, "b_bytes": b}).fillna(0).astype("int64")
    return both.assign(change_bytes=both["b_bytes"] - both["a_bytes"])
