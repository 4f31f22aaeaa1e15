# ruff: noqa: E501 (tables, one field a line)
# fmt: off
"""What was predicted of a run's memory, beside what it measured."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from lmbench.records.field import About, PerPhase


class MemoryPrediction(Struct):
    """Memory prediction: by the configuration alone, on fake tensors."""

    reason: Annotated[str | None, About("text", "no prediction because", "Why there is no prediction, where it was asked for and there is none.")] = None
    method: Annotated[str | None, About("text", "predicted from", "What was run on fake tensors: every block, or a few of them.")] = None
    peak_allocated_bytes: Annotated[int | None, About("bytes", "predicted peak", "Peak that was predicted for a step.", "down")] = None
    peak_reserved_bytes: Annotated[int | None, About("bytes", "predicted reserved", "What the allocator was predicted to hold for it.", "down")] = None
    phase_peak_allocated_bytes: Annotated[PerPhase[int] | None, About("bytes", "predicted peak in <phase>", "Peak that was predicted for <phase>.", "down")] = None
    error_fraction: Annotated[float | None, About("fraction", "prediction error", "Signed: predicted / `memory.steady_peak_allocated_bytes` - 1; null where nothing was measured.")] = None
