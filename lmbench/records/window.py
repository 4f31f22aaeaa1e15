"""Which of a run's steps statistics rest on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lmbench.records.step import StepRecord


@dataclass(frozen=True)
class WindowSteps:
    """The window's step records: those that enter statistics, and how many do not and why."""

    used: list[StepRecord]
    micro_batches: int | None
    skipped_count: int
    short_count: int


def select_window(records: Iterable[StepRecord], micro_batches: int | None = None) -> WindowSteps:
    """The steps that statistics rest on: of stage `window`, full, and not skipped by the scaler.

    A full step has `micro_batches`; where that is not given, as many as the window's longest step.
    """
    window = [record for record in records if record.stage == "window"]
    counts = [record.micro_batches for record in window if record.micro_batches is not None]
    full = micro_batches if micro_batches is not None else max(counts, default=None)
    kept = [record for record in window if not record.is_skipped]
    used = [record for record in kept if full is None or record.micro_batches in (None, full)]
    return WindowSteps(used, full, len(window) - len(kept), len(kept) - len(used))
