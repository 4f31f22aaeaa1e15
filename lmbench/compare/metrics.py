"""What a comparison compares: one value of each run, step time first, then phases and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lmbench.records.run import RunRecord
from lmbench.records.schema import fields, value_at
from lmbench.records.vocabulary import PHASES

#: What a change up or down is called: of times, and of anything else.
TIME_WORDS = ("slower", "faster")
SIZE_WORDS = ("larger", "smaller")


@dataclass(frozen=True)
class Metric:
    """A figure of one run: its name in a comparison, its title in tables, and the record's field that it is."""

    name: str
    title: str
    field: str

    @property
    def unit(self) -> str:
        return fields("run")[self.field].unit

    def of(self, record: RunRecord) -> float | None:
        """The run's value, None where it has none or none above 0 (whose logarithm a ratio takes)."""
        value = step_sample_s(record) if self is STEP else value_at(record, self.field)
        return value if value is not None and 0 < value < math.inf else None


STEP = Metric("step_s", "step", "window.wall_s")
_MEMORY = {
    "steady_peak_allocated_bytes": "steady peak",
    "run_peak_allocated_bytes": "run peak",
    "run_peak_reserved_bytes": "peak reserved",
    "host_peak_rss_bytes": "host peak",
}
METRICS = (
    STEP,
    *(Metric(f"{phase}_s", phase, f"phases.{phase}.mean_s") for phase in PHASES),
    *(Metric(name, title, f"memory.{name}") for name, title in _MEMORY.items()),
)

SAMPLE = (
    "one process is one sample: its window's wall time divided by its steps (where some steps were skipped or short, "
    "the mean of the others); A and B are geometric means of these; every round of a sweep's repeats has a server of "
    "its own"
)


def step_sample_s(record: RunRecord) -> float | None:
    """Seconds a step of this process: `window.wall_s / window.steps`, no step trimmed or dropped.

    Skipped and short steps take another time and are in no statistic; where the window has some it is the mean of the
    others. None for a window without steps.
    """
    window, step = record.window, record.phases.step
    if not window.wall_s or not window.steps or min(window.wall_s, window.steps) < 0:
        return None
    if window.skipped_count or window.short_count:
        return step.mean_s if step else None
    return window.wall_s / window.steps
