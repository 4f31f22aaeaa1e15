"""What a comparison compares: one value of each run, step time first, then phases and memory."""

from __future__ import annotations

from dataclasses import dataclass

from lmbench.compare.verdict import SIZE_WORDS, TIME_WORDS
from lmbench.records.paths import number
from lmbench.records.vocabulary import PHASES, Record


@dataclass(frozen=True)
class Metric:
    """A figure of one run. `words` are what more and less of it are called."""

    name: str
    title: str
    unit: str
    path: str

    @property
    def words(self) -> tuple[str, str]:
        return TIME_WORDS if self.unit == "s" else SIZE_WORDS

    def of(self, run: Record) -> float | None:
        """The run's value, None where it has none or none above 0 (whose logarithm a ratio takes)."""
        value = step_sample_s(run) if self is STEP else number(run, self.path)
        return value if value is not None and 0 < value < float("inf") else None


STEP = Metric("step_s", "step", "s", "window.wall_s")

METRICS = (
    STEP,
    *(Metric(f"{phase}_s", phase, "s", f"phases.{phase}.mean_s") for phase in PHASES),
    *(
        Metric(name, title, "bytes", f"memory.{name}")
        for name, title in (
            ("steady_peak_allocated_bytes", "steady peak"),
            ("run_peak_allocated_bytes", "run peak"),
            ("run_peak_reserved_bytes", "peak reserved"),
            ("host_peak_rss_bytes", "host peak"),
        )
    ),
)

SAMPLE = (
    "one process is one sample: its window's wall time divided by its steps (where some steps were skipped or short, "
    "the mean of the others); A and B are geometric means of these"
)


def step_sample_s(run: Record) -> float | None:
    """Seconds a step of this process: `window.wall_s / window.steps`, no step trimmed or dropped.

    Skipped and short steps take another time and are in no statistic (design section 7); where the window has some it
    is the mean of the others. None for a window without steps.
    """
    wall_s, steps = number(run, "window.wall_s"), number(run, "window.steps")
    if not wall_s or not steps or min(wall_s, steps) < 0:
        return None
    if number(run, "window.skipped_count") or number(run, "window.short_count"):
        return number(run, "phases.step.mean_s")
    return wall_s / steps
