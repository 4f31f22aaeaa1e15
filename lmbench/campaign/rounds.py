"""Two sides measured in rounds, in turn, until the verdict stands."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lmbench.campaign.sides import WINDOW, has_window
from lmbench.campaign.sweep import Sweep
from lmbench.campaign.waiting import taken_percent
from lmbench.compare.comparison import INVALID, UNDECIDED, CellComparison, Comparison, compare
from lmbench.compare.rounds import rounds_until
from lmbench.records.load import is_run_folder
from lmbench.records.store import RUNS_FOLDER
from lmbench.records.vocabulary import MIN_REPEATS, SIDE
from lmbench.report.units import duration, percent_short
from lmbench.standard_output import result_alone
from lmbench.sweep.engine import Engine
from lmbench.sweep.execute import Pace
from lmbench.sweep.file import SweepFile
from lmbench.sweep.plan import make_plan

#: Seconds and steps of the first rounds' windows, and the longest window. On a busy machine a short one tells little:
#: on two cores with two spinning processes, first rounds of 1 s showed -2 to +20 % of a change of +11 %, and 38 of 42
#: later ones, mostly of 5 to 8 s, +10 to +13 %.
_FIRST_WINDOW_S, _BUSY_WINDOW_S, _WINDOW_STEPS, _MOST_WINDOW_S = 1.0, 4.0, 6, 30.0
#: Longer windows leave the budget time for so many rounds in all, and so many more.
_PLANNED_ROUNDS, _LEAST_LEFT = 8, 4
#: Without a given budget, comparisons may take this many times the rounds that a change of the gate's size takes.
_AUTO_FACTOR = 1.5
#: The title of rounds that are a command of their own.
COMPARE = "compare"
#: Longer budgets are told in minutes.
_MOST_TOLD_IN_S = 120.0


@dataclass
class Rounds:
    """Two sides that are measured in rounds, on this machine or as tasks of an engine.

    Attributes:
        path: the folder of the sweep of both sides.
        file: that sweep.
        tolerance: changes up to this fraction count as none.
        budget_s: about how long to measure, to half a round; an infinite one is as long as the gate needs.
        about: dotted names of what is compared.
        engine: runs the rounds elsewhere; None measures them here.
        limits: limits of single runs, and their compile cache.
        more: rounds to measure beside those that were measured before, whatever the verdict; None measures until it
            stands.
        title: the command, which begins the lines on progress. The budget of any but `compare` is for more than rounds.
        advice: a sentence on the rounds and the time that are needed, after the first round.
        more_s: that time.
    """

    path: Path
    file: SweepFile
    tolerance: float
    budget_s: float
    about: Sequence[str] = ()
    engine: Engine | None = None
    limits: Pace = field(default_factory=Pace)
    more: int | None = None
    title: str = COMPARE
    advice: str = ""
    more_s: float = 0.0

    def __post_init__(self) -> None:
        plan = make_plan(self.path.name, self.file)
        pace = replace(self.limits, is_enough=self._is_enough, window_options=self._window_options)
        self._sweep = Sweep(plan, self.path, self.title, pace=pace, engine=self.engine)
        self._began_s = time.monotonic()
        # None until the first round that is measured now.
        self._round_began_s: float | None = None
        missing = [job.repeat for job in plan.jobs() if not is_run_folder(self.path / RUNS_FOLDER / job.name)]
        #: Rounds that were measured before.
        self.kept_rounds = min(missing, default=self.file.repeats)
        self._sets_window = not has_window(self.file)
        is_busy = self._sets_window and not self.kept_rounds and taken_percent() > 0
        self._window_s = _BUSY_WINDOW_S if is_busy else _FIRST_WINDOW_S

    def measure(self) -> Comparison:
        """Measure until the verdict stands or the budget ends; returns the comparison.

        Raises:
            Failure: the disk is full, or a process cannot be started.
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
        if self.more is not None:
            return rounds >= self.kept_rounds + self.more
        if rounds < self.kept_rounds:
            return False
        comparison, now_s = self.compare(), time.monotonic()
        elapsed_s, round_s = now_s - self._began_s, 0.0
        if self._round_began_s is not None:
            round_s, self._round_began_s = now_s - self._round_began_s, now_s
        # The last round ends half a round before the end of the budget at most, and half a round after it.
        is_over = elapsed_s + round_s / 2 > self.budget_s
        cell = comparison.cells[0] if comparison.cells else None
        self._sweep.progress.keep(f"round {rounds}, {duration(elapsed_s)}: {comparison.verdict}: {comparison.reason}")
        if cell is None or not cell.metrics or comparison.verdict == INVALID:
            # A guard may fail by accident, and a round whose sides ran on two hosts is no pair, but the next one is.
            is_settled = cell is not None and (comparison.verdict == INVALID or rounds >= MIN_REPEATS)
            return is_over or is_settled or any(run.outcome != "ok" for run in (*comparison.a.runs, *comparison.b.runs))
        if comparison.verdict != UNDECIDED:
            return True
        # Rounds that were kept from before took no time now, and tell nothing about the rest.
        if round_s:
            is_first = not self.advice
            self._advise(cell, round_s)
            if is_first:
                whole = f", --budget {budget_text(elapsed_s + self.more_s)}" if self.title == COMPARE else ""
                self._sweep.progress.keep(f"{self.advice}{whole}")
        self._lengthen_window(cell, round_s, self.budget_s - elapsed_s)
        if self.budget_s == math.inf:
            enough = _AUTO_FACTOR * rounds_until(self.tolerance, cell.round_std)
            is_over = len(cell.used_a) >= max(enough, _PLANNED_ROUNDS)
        return is_over

    def _advise(self, cell: CellComparison, round_s: float) -> None:
        """Work out the time that a change of twice the tolerance takes, and the sentence on it."""
        change = 2 * self.tolerance
        needed = max(len(cell.used_a) + 1, rounds_until(change, cell.round_std))
        self.more_s = (needed - len(cell.used_a)) * round_s
        about = "about" if cell.round_std else "at least"
        self.advice = (
            f"a round takes {duration(round_s)}; +{percent_short(change)} takes {about} {needed} rounds: "
            f"{duration(self.more_s)} more"
        )

    def _lengthen_window(self, cell: CellComparison, round_s: float, rest_s: float) -> None:
        """Lengthen the window as the noise needs it, and as the rest of the budget has time for enough rounds.

        The noise of a window falls with the square root of its length. It has to be below a third of the change so far,
        or half of the gate, which `same` takes about eight rounds of.
        """
        step = cell.metrics[0]
        target = max(math.log1p(self.tolerance) / 2, abs(math.log(step.ratio.point)) / 3)
        # Without turns nothing tells the window's part of the noise.
        std = cell.round_std if cell.window_std is None else cell.window_std
        windows_s = sum(max(self._window_s, _WINDOW_STEPS * step_s) for step_s in (step.a, step.b))
        needed_s = windows_s / 2 * ((std or 0.0) / target) ** 2
        rounds = max(_LEAST_LEFT, _PLANNED_ROUNDS - len(cell.used_a))
        affordable_s = (rest_s / rounds - (round_s - windows_s)) / 2
        self._window_s = max(self._window_s, min(needed_s, affordable_s, _MOST_WINDOW_S))

    def _window_options(self, repeat: int) -> list[str]:
        """The options of the coming round's window; none where the user set the window."""
        # The first round begins here, after servers have started and the options were checked.
        self._round_began_s = self._round_began_s or time.monotonic()
        if not self._sets_window:
            return []
        return [f"--{name}={value:g}" for name, value in zip(WINDOW, (self._window_s, _WINDOW_STEPS), strict=True)]


def budget_text(time_s: float) -> str:
    """A time as a word for `--budget`, rounded up."""
    return f"{math.ceil(time_s)}s" if time_s < _MOST_TOLD_IN_S else f"{math.ceil(time_s / 60)}m"
