"""What a recorded history adds to a report: columns of the parts of the peak, of the prediction, and timelines."""

from __future__ import annotations

from lmbench.memory.categories import CATEGORIES, CATEGORY_LABELS
from lmbench.memory.timeline import TIMELINE_FILE, memory_chart, read_timeline
from lmbench.records.instruments import MemoryHistoryRecord
from lmbench.records.load import Run
from lmbench.records.schema import value_at
from lmbench.report.answer import Chart
from lmbench.report.catalogue import Feature
from lmbench.report.columns import Column, per_cell
from lmbench.report.frame import Frame
from lmbench.report.timeline import page_charts
from lmbench.report.units import GIB, PERCENT, Unit


def _fragmentation(run: Run) -> float | None:
    """Share of the reserved memory that nothing was in at the peak."""
    history = run.record.memory_history
    if history is None or not history.peak_reserved_bytes or history.peak_allocated_bytes is None:
        return None
    return 1 - history.peak_allocated_bytes / history.peak_reserved_bytes


def _of_history(name: str, title: str, field: str, unit: Unit = GIB) -> Column:
    """A number of a cell's first run with a history, which is a run of its own beside those that are timed."""
    read = per_cell(lambda run: value_at(run.record, f"memory_history.{field}"), is_shown=None)
    return Column(name, title, read, unit, None)


def _of_prediction(name: str, title: str, field: str, unit: Unit) -> Column:
    """A number of the prediction for a cell's runs, which have all one configuration."""
    return Column(
        name, title, per_cell(lambda run: value_at(run.record, f"memory_prediction.{field}"), outcome=None), unit, None
    )


def _no_history(frame: Frame, cell: int) -> list[str]:
    """Why runs of a cell have no history to show, or a cut one, each reason once."""
    histories: list[MemoryHistoryRecord] = [
        run.record.memory_history for run in frame.runs_of(cell, is_shown=None) if run.record.memory_history is not None
    ]
    reasons = [f"no history: {history.reason}" for history in histories if history.reason]
    cut = ["the history is not complete"] * any(history.is_complete is False for history in histories)
    return list(dict.fromkeys([*reasons, *cut]))


def _timelines(frame: Frame) -> list[Chart]:
    return page_charts(
        frame, TIMELINE_FILE, lambda run: run.record.memory_history is not None, memory_chart, read_timeline
    )


MEMORY = Feature(
    columns=(
        _of_prediction("predicted_peak_bytes", "predicted", "peak_allocated_bytes", GIB),
        _of_prediction("prediction_error_fraction", "error", "error_fraction", PERCENT),
        _of_history("history_peak_bytes", "history's peak", "peak_allocated_bytes"),
        *(_of_history(f"peak_{n}_bytes", CATEGORY_LABELS[n], f"categories.{n}_bytes") for n in CATEGORIES),
        _of_history("peak_unknown_fraction", "unknown", "unknown_fraction", PERCENT),
        Column("peak_fragmented_fraction", "reserved in vain", per_cell(_fragmentation, is_shown=None), PERCENT, None),
        _of_history("saved_for_backward_bytes", "saved for backward", "saved_bytes"),
    ),
    row_notes=_no_history,
    charts=_timelines,
)
