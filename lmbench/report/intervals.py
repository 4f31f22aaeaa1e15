"""Points of a chart from cells: the value in the chart's unit, and the interval around it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lmbench.records.statistics import sample_std
from lmbench.report.cells import Cell
from lmbench.report.chart import Point
from lmbench.report.columns import Measure, numbers
from lmbench.report.relative import COLUMN, Pairing

_MILLI, _GIB, _PERCENT = 1e3, 2.0**-30, 100.0
#: Processes from which on an interval of their mean says something.
_ENOUGH = 3
_BETWEEN = "95 % interval of the mean between processes"
_WITHIN = "the middle 90 % of the steps of a run (all of them under 20 steps)"
#: Quantities with whiskers, and the value of each process.
_PATHS = {
    "step_s": "phases.step.mean_s",
    "tokens_per_s": "throughput.tokens_per_s",
    "mfu_fraction": "throughput.mfu_fraction",
}


def make_point(cell: Cell, x: str | float, name: str, pairing: Pairing) -> Point:
    """A cell's point of the column `name` at `x`."""
    if not cell.ok:
        return Point(x, None, outcome=cell.label, tip=f"{cell.name}: {cell.label}")
    column, scale = COLUMN[name], _scale(name)
    measure = column.read(cell, pairing.of(cell))
    if measure is None:
        return Point(x, None)
    ends = [None if end is None else end * scale for end in interval(cell, name, measure)]
    tip = f"{cell.name}: {column.show(measure)}, {column.heading}"
    return Point(x, measure.value * scale, ends[0], ends[1], tip=tip)


def _scale(name: str) -> float:
    """From SI to the unit of the column's heading."""
    if name.endswith("_bytes"):
        return _GIB
    if name.endswith("_fraction"):
        return _PERCENT
    return _MILLI if name.endswith("_s") and not name.endswith(("per_s", "first_step_s")) else 1.0


def interval(cell: Cell, name: str, measure: Measure) -> tuple[float | None, float | None]:
    """Interval of a quantity that has one, in SI.

    From three processes on the 95 % interval of the mean between them (Student's t); with fewer, for the step's time,
    the 5th to the 95th percentile of the steps, or their range where these are too few to have percentiles.
    """
    values = numbers(cell, _PATHS[name]) if name in _PATHS else []
    if len(values) >= _ENOUGH:
        from scipy.special import stdtrit  # type: ignore[import-untyped]

        std = sample_std(values, statistics.fmean(values)) or 0.0
        half = float(stdtrit(len(values) - 1, 0.975)) * std / len(values) ** 0.5
        return measure.value - half, measure.value + half
    if name == "step_s":
        for low, high in (("p5_s", "p95_s"), ("min_s", "max_s")):
            lows, highs = numbers(cell, f"phases.step.{low}"), numbers(cell, f"phases.step.{high}")
            if lows and highs:
                return min(lows), max(highs)
    return None, None


def whiskers(cells: Sequence[Cell], name: str) -> str:
    """What the whiskers of this quantity are; empty where it has none."""
    counts = {len(cell.ok) for cell in cells if cell.ok}
    if name not in _PATHS or not counts:
        return ""
    if min(counts) >= _ENOUGH:
        return _BETWEEN
    if name != "step_s":
        return f"{_BETWEEN} where there are three or more" if max(counts) >= _ENOUGH else ""
    return f"{_BETWEEN}; {_WITHIN} where there are fewer than three" if max(counts) >= _ENOUGH else _WITHIN


def device_memory(cells: Sequence[Cell]) -> tuple[float, str] | None:
    """The device's memory in GiB as a level to mark, where all cells have the same."""
    totals = {total for cell in cells for s in cell.samples if (total := s.number("memory.device_total_bytes"))}
    if len(totals) != 1:
        return None
    total = totals.pop() * _GIB
    return total, f"device memory {total:.1f} GiB"
