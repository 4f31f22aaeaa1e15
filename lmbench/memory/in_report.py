"""What a recorded history adds to a report: columns of the parts of the peak, of the prediction, and timelines."""

from __future__ import annotations

from functools import partial
from operator import attrgetter

from lmbench.memory.recorded import CATEGORIES, CATEGORY_LABELS
from lmbench.memory.timeline import TIMELINE_FILE, memory_chart, read_timeline
from lmbench.records.schema import value_at
from lmbench.report.catalogue import Feature
from lmbench.report.columns import Column, per_cell
from lmbench.report.frame import Frame
from lmbench.report.timeline import page_charts
from lmbench.report.units import GIB, PERCENT, Unit


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
    charts=partial(
        page_charts,
        file=TIMELINE_FILE,
        is_meant=attrgetter("record.memory_history"),
        chart=memory_chart,
        read=read_timeline,
    ),
)
