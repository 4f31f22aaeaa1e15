"""Two sides measured in rounds, in turn, until the verdict stands."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lmbench.campaign.sides import WINDOW, has_window
from lmbench.campaign.sweep import Sweep
from lmbench.compare.comparison import INVALID, UNDECIDED, CellComparison, Comparison, compare
from lmbench.records.load import is_run_folder
from lmbench.records.store import RUNS_FOLDER
from lmbench.records.vocabulary import MIN_REPEATS, SIDE
from lmbench.report.units import duration
from lmbench.standard_output import result_alone
from lmbench.sweep.engine import Engine
from lmbench.sweep.execute import Pace
from lmbench.sweep.file import SweepFile
from lmbench.sweep.plan import make_plan

#: Seconds and steps of the first rounds' windows. Longer windows must leave the budget time for this many rounds.
_FIRST_WINDOW_S, _WINDOW_STEPS, _LEAST_ROUNDS = 0.5, 10, 12


@dataclass
class Rounds:
    """Two sides that are measured in rounds, on this machine or as tasks of an engine.

    Attributes:
        path: the folder of the sweep of both sides.
        file: that sweep.
        tolerance: changes up to this fraction count as none.
        budget_s: the time after which no further round starts.
        about: dotted names of what is compared.
        engine: runs the rounds elsewhere; None measures them here.
        limits: limits of single runs, and their compile cache.
    """

    path: Path
    file: SweepFile
    tolerance: float
    budget_s: float
    about: Sequence[str] = ()
    engine: Engine | None = None
    limits: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        plan = make_plan(self.path.name, self.file)
        pace = replace(self.limits, is_enough=self._is_enough, window_options=self._window_options)
        self._sweep = Sweep(plan, self.path, pace=pace, engine=self.engine)
        self._began_s, self._window_s = time.monotonic(), _FIRST_WINDOW_S
        missing = [job.repeat for job in plan.jobs() if not is_run_folder(self.path / RUNS_FOLDER / job.name)]
        self._kept_rounds = min(missing, default=self.file.repeats)

    def measure(self) -> Comparison:
        """Measure until the verdict stands or the budget ends; returns the comparison.

        Raises:
            SweepHalted: the disk is full, or a process cannot be started.
        """
        # Standard output has the verdict alone, in every output format.
        with result_alone():
            self._sweep.carry_out()
        return self.compare()

    def compare(self) -> Comparison:
        """The comparison of the rounds so far."""
        return compare(f"{self.path}@{SIDE}=A", f"{self.path}@{SIDE}=B", self.tolerance, self.about)

    def _is_enough(self, rounds: int) -> bool:
        """Whether measuring ends after this many rounds: the verdict stands, or the budget is spent."""
        if rounds < self._kept_rounds:
            return False
        comparison, elapsed_s = self.compare(), time.monotonic() - self._began_s
        cell = comparison.cells[0] if comparison.cells else None
        reason = cell.reasons[0] if cell else "no run counts"
        self._sweep.progress.keep(f"round {rounds}, {duration(elapsed_s)}: {comparison.verdict}: {reason}")
        if cell is None or comparison.verdict == INVALID:
            return True
        if not cell.metrics:
            # A run with outcome ok was left out for a failed guard. That may be an accident, so measure again.
            left_out = (*cell.left_out_a, *cell.left_out_b)
            return rounds >= MIN_REPEATS or any(run.outcome != "ok" for run in left_out)
        round_s = elapsed_s / max(1, rounds - self._kept_rounds)
        self._lengthen_window(cell, round_s, self.budget_s - elapsed_s)
        return comparison.verdict != UNDECIDED or elapsed_s + round_s > self.budget_s

    def _lengthen_window(self, cell: CellComparison, round_s: float, rest_s: float) -> None:
        """Double the window where the noise needs it and the rest of the budget has time for it."""
        has_time = rest_s > _LEAST_ROUNDS * (round_s + 2 * self._window_s)
        # The standard deviation of a single round is 0, so that it never lengthens windows.
        if has_time and statistics.pstdev(cell.metrics[0].ratio.differences) > self.tolerance:
            self._window_s *= 2

    def _window_options(self) -> list[str]:
        """The options of the coming round's window; none where the user set the window."""
        if has_window(self.file):
            return []
        return [f"--{name}={value:g}" for name, value in zip(WINDOW, (self._window_s, _WINDOW_STEPS), strict=True)]
