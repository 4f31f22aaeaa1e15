# ruff: noqa: E501 (tables, one field a line)
# fmt: off
"""What a run has from the history of the device's allocator: what its peak is made of."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct, field

from lmbench.records.field import About


class SavedPerBlock(Struct):
    """Blocks of the model that save alike for the backward, the first and the last by path; bytes of each."""

    first: str
    last: str
    count: int
    each_bytes: int


class TopAllocation(Struct):
    """Blocks of one kind among the largest at the peak."""

    size_bytes: int
    count: int
    category: str
    part: str
    phase: str
    where: str


class MemoryHistoryRecord(Struct):
    """Memory history: what the peak of the recorded steps is made of."""

    reason: Annotated[str | None, About("text", "no history because", "Why there is no history, or why it could not be examined; null where it is.")] = None
    steps: Annotated[int | None, About("count", "recorded steps", "Steps in the history: the first of the window.")] = None
    max_entries: Annotated[int | None, About("count", "most entries", "Entries that the history may hold; older ones are lost.")] = None
    snapshot_file: Annotated[str | None, About("text", "snapshot", "The snapshot, in the result folder; `memory_notes.json` lies beside it.")] = None
    snapshot_bytes: Annotated[int | None, About("bytes", "snapshot size", "Size of the snapshot.")] = None
    entry_count: Annotated[int | None, About("count", "entries", "Entries of the history.")] = None
    is_complete: Annotated[bool | None, About("flag", "complete history", "No entry of the recorded steps is missing.")] = None
    peak_allocated_bytes: Annotated[int | None, About("bytes", "history's peak", "Most that was allocated in the recorded steps, as replayed.", "down")] = None
    peak_requested_bytes: Annotated[int | None, About("bytes", "asked for at the peak", "What was asked for of it, before rounding.", "down")] = None
    peak_reserved_bytes: Annotated[int | None, About("bytes", "reserved at the peak", "Reserved at that moment.", "down")] = None
    peak_phase: Annotated[str | None, About("text", "phase of the peak", "Phase in which the peak is.")] = None
    unknown_fraction: Annotated[float | None, About("fraction", "unknown", "Share of the peak without a category.", "down")] = None
    categories: Annotated[dict[str, int], About("tree", "peak by category", "Bytes at the peak by category: `parameters_bytes`, ...")] = field(default_factory=dict)
    parts: Annotated[dict[str, int], About("tree", "peak by part", "Bytes at the peak by the module that made them, the largest first; `*` is any block.")] = field(default_factory=dict)
    saved_bytes: Annotated[int | None, About("bytes", "saved for backward", "What the forward of the peak's step saved for the backward, parameters left out.", "down")] = None
    saved: Annotated[list[SavedPerBlock], About("tree", "saved by block", "The same by block of the model: first, last, count, `each_bytes`.")] = field(default_factory=list)
    residual_computed_bytes: Annotated[int | None, About("bytes", "residual stream", "Batch x context x d_model by the shape, in the precision between the blocks.")] = None
    residual_seen_bytes: Annotated[int | None, About("bytes", "residual stream seen", "Size of most blocks' outputs in the history.")] = None
    top: Annotated[list[TopAllocation], About("tree", "largest", "The largest at the peak: size, count, category, part, phase, where from.")] = field(default_factory=list)
