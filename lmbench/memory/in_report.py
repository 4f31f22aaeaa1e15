"""What a recorded history adds to a report: columns of what the peak is made of, and timelines on its page."""

from __future__ import annotations

from collections.abc import Callable

from lmbench.memory.categories import CATEGORIES, CATEGORY_LABELS
from lmbench.records.instruments import MemoryHistoryRecord, MemoryPrediction
from lmbench.report.cells import Cell
from lmbench.report.columns import Column, Measure, Reader
from lmbench.report.feature import Feature, PagePart
from lmbench.report.units import GIB, PERCENT


def _of_history(read: Callable[[MemoryHistoryRecord], float | None]) -> Reader:
    """A number of a cell's first run that has a history; it is a run of its own beside those that are timed."""

    def of_cell(cell: Cell, _baseline: Cell | None) -> Measure | None:
        for sample in (*cell.samples, *cell.passes):
            history = sample.record.memory_history
            if sample.outcome == "ok" and history is not None and (value := read(history)) is not None:
                return Measure(value)
        return None

    return of_cell


def _of_prediction(read: Callable[[MemoryPrediction], float | None]) -> Reader:
    """A number of what was predicted of a cell's runs, which have all one configuration."""

    def of_cell(cell: Cell, _baseline: Cell | None) -> Measure | None:
        for sample in cell.samples:
            prediction = sample.record.memory_prediction
            if prediction is not None and (value := read(prediction)) is not None:
                return Measure(value)
        return None

    return of_cell


def _by_category(name: str) -> Reader:
    return _of_history(lambda history: history.categories.get(f"{name}_bytes"))


def _fragmentation(history: MemoryHistoryRecord) -> float | None:
    if not history.peak_reserved_bytes or history.peak_allocated_bytes is None:
        return None
    return 1 - history.peak_allocated_bytes / history.peak_reserved_bytes


def _no_history(cell: Cell) -> list[str]:
    """Why runs of a cell have no history to show, or a cut one, each reason once."""
    found = [sample.record.memory_history for sample in (*cell.samples, *cell.passes)]
    known = [history for history in found if history is not None]
    reasons = [f"no history: {history.reason}" for history in known if history.reason]
    cut = ["the history is not complete"] if any(history.is_complete is False for history in known) else []
    return list(dict.fromkeys([*reasons, *cut]))


def _timelines() -> PagePart:
    from lmbench.memory.timeline_picture import MemoryTimelines

    return MemoryTimelines()


MEMORY = Feature(
    columns=(
        Column("predicted_peak_bytes", "predicted", _of_prediction(lambda found: found.peak_allocated_bytes), GIB),
        Column("prediction_error_fraction", "error", _of_prediction(lambda found: found.error_fraction), PERCENT),
        Column("history_peak_bytes", "history's peak", _of_history(lambda found: found.peak_allocated_bytes), GIB),
        *(Column(f"peak_{name}_bytes", CATEGORY_LABELS[name], _by_category(name), GIB) for name in CATEGORIES),
        Column("peak_unknown_fraction", "unknown", _of_history(lambda found: found.unknown_fraction), PERCENT),
        Column("peak_fragmented_fraction", "reserved in vain", _of_history(_fragmentation), PERCENT),
        Column("saved_for_backward_bytes", "saved for backward", _of_history(lambda found: found.saved_bytes), GIB),
    ),
    row_notes=_no_history,
    page_part=_timelines,
)
