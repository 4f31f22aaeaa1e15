"""How long a sweep will take: from the runs that ended, before that from the least that each can take."""

from __future__ import annotations

from typing import Any

import yaml

from lmbench.records.paths import number
from lmbench.records.vocabulary import Record
from lmbench.sweep.engine import Engine
from lmbench.sweep.grid import Cell
from lmbench.sweep.plan import Job, Plan

# `lmbench fit`'s own, where neither file nor command line says otherwise.
_MIN_WINDOW_S = 3.0


class Estimate:
    """The time that is left. A cell takes as long as it took before; one that never ran as long as others took, or
    at least its start and its window."""

    def __init__(self, plan: Plan, engine: Engine) -> None:
        most_s = plan.file.timeout_s
        self._least_s = {cell.id: min(_window_s(plan, cell) + engine.start_s, most_s) for cell in plan.cells}
        self._left = {cell.id: plan.repeats_of(cell) for cell in plan.cells}
        self._took_s: dict[str, float] = {}
        # Sums, since they are asked for after every run: of cells that ran, and of those that did not.
        self._known_left_s = 0.0
        self._unknown_left_s = sum(self._least_s[cell] * left for cell, left in self._left.items())
        self._factors = 0.0

    def done(self, job: Job, run: Record) -> None:
        """A run ended, now or at an earlier start."""
        cell = job.cell.id
        took_s, left = self._took_s.get(cell), self._left[cell]
        if took_s is None:
            self._unknown_left_s -= self._least_s[cell] * left
        else:
            self._known_left_s -= took_s * left
            self._factors -= took_s / self._least_s[cell]
        self._left[cell] = left = left - 1
        total_s = number(run, "sweep.cost.total_s")
        if total_s is not None and (run.get("outcome") == "ok" or took_s is None):
            took_s = self._took_s[cell] = total_s
        if took_s is None:
            self._unknown_left_s += self._least_s[cell] * left
        else:
            self._known_left_s += took_s * left
            self._factors += took_s / self._least_s[cell]

    def left_s(self, elapsed_s: float = 0.0) -> float:
        """Seconds until the end, where the present run has taken `elapsed_s` so far."""
        factor = self._factors / len(self._took_s) if self._took_s else 1.0
        return max(0.0, self._known_left_s + self._unknown_left_s * factor - elapsed_s)


def duration(seconds: float) -> str:
    """Seconds in words that are short: 4.2 s, 3 min, 1 h 5 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 60 * 100 else f"{minutes // 60} h"


def _window_s(plan: Plan, cell: Cell) -> float:
    content: Any = yaml.safe_load(plan.base_config) if plan.base_config is not None else {}
    configured = number(content, "measure.min_window_s")
    given = cell.options.get("measure.min_window_s", configured)
    try:
        return _MIN_WINDOW_S if given is None else float(given)
    except (TypeError, ValueError):
        return _MIN_WINDOW_S
