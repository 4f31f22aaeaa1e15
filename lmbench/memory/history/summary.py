"""A history's findings as a part of a run's record."""

from __future__ import annotations

from pathlib import Path

from lmbench.memory.categories import CATEGORY_LABELS
from lmbench.memory.history.findings import Findings, examine
from lmbench.memory.timeline import memory_timeline, write_timeline
from lmbench.records.guard import Guard
from lmbench.records.instruments import MemoryHistoryRecord, SavedPerBlock, TopAllocation

_TOP, _PARTS = 10, 40


def examine_run(folder: Path) -> tuple[MemoryHistoryRecord, list[Guard]]:
    """The figures of the history in a run's folder and its guards; writes the timeline beside it.

    Raises UsageError for a history that cannot be read, OSError where the timeline cannot be written.
    """
    found = examine(folder)
    record = (found.run and found.run.memory_history) or MemoryHistoryRecord()
    summarize(found, record)
    write_timeline(memory_timeline(found), folder)
    return record, found.guards


def summarize(found: Findings, record: MemoryHistoryRecord) -> None:
    """Fill in what a history says."""
    record.entry_count = found.played.entry_count
    record.is_complete = found.is_complete
    record.peak_allocated_bytes = found.peak_bytes
    record.peak_requested_bytes = found.peak_requested_bytes
    record.peak_reserved_bytes = found.peak_reserved_bytes
    record.peak_phase = found.peak_phase
    record.unknown_fraction = found.unknown_fraction
    record.categories = {f"{name}_bytes": size for name, size in found.by_category.items()}
    parts = {part or "none": sum(sizes.values()) for part, sizes in found.by_part.items()}
    record.parts = dict(list(parts.items())[:_PARTS])
    record.saved_bytes = sum(each.each_bytes * each.count for each in found.saved)
    record.saved = [SavedPerBlock(each.first, each.last, each.count, each.each_bytes) for each in found.saved]
    if found.residual is not None:
        record.residual_computed_bytes = found.residual.computed_bytes
        seen = found.residual.seen_bytes
        record.residual_seen_bytes = max(seen, key=lambda size: seen[size]) if seen else None
    record.top = [
        TopAllocation(
            each.size_bytes, each.count, CATEGORY_LABELS[each.category], each.owner, each.phase, each.user_frame
        )
        for each in found.largest[:_TOP]
    ]
