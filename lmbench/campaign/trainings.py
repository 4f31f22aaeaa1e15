"""Trainings of two configurations from the same seeds, by which both are judged to train alike."""

from __future__ import annotations

from collections.abc import Iterable

from lmbench.compare.sides import typical_step_s
from lmbench.records.run import RunRecord
from lmbench.sweep.file import Options
from lmbench.tune.search import SEEDS

#: The most steps of a training.
MOST_STEPS = 200
#: Trainings may take this many times longer than expected.
_MARGIN = 1.3


def affordable_steps(records: Iterable[RunRecord], budget_s: float) -> int:
    """The number of steps for which the budget can train these configurations from every seed, at most `MOST_STEPS`."""
    per_step_s = overhead_s = 0.0
    for record in records:
        per_step_s += typical_step_s(record) or 0.0
        overhead_s += record.cost_s - (record.window.wall_s or 0.0)
    steps = (budget_s / _MARGIN / len(SEEDS) - overhead_s) / per_step_s if per_step_s else 0.0
    return int(min(MOST_STEPS, max(0, steps)))


def training_options(record: RunRecord, steps: int) -> Options:
    """The options of a training of a run's configuration."""
    options: Options = {
        "measure.steps": steps,
        "measure.min_window_s": 0.0,
        "measure.probe_steps": 0,
        "measure.gradient_norm": True,
    }
    if record.data.source == "random" and str(record.data.name).startswith("lmbench."):
        # Random tokens teach nothing, and neither do a few batches over and over.
        options |= {"data.source": "text", "data.num_batches": steps + 10}
    return options
