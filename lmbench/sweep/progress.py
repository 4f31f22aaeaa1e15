"""What a sweep says while it runs: a line for every run that ended, what goes on now, and how long it will take."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from contextlib import suppress
from functools import cache
from statistics import fmean
from typing import Any, TextIO

from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from lmbench.configs import parse_yaml
from lmbench.masking import masked_message
from lmbench.records.run import RunRecord
from lmbench.report.console import make_console
from lmbench.report.units import duration
from lmbench.sweep.local import START_S
from lmbench.sweep.plan import GridCell, Job, Plan
from lmbench.text import one_line, shown

_WIDTH = 80
_INDENT = " " * 8
#: Where nothing can be overwritten (a log file), a run that takes long is told of as often as this.
_HEARTBEAT_S = 60.0
# `lmbench fit`'s own, where neither file nor command line says otherwise.
_MIN_WINDOW_S = 3.0


class Estimate:
    """The time that is left. A cell takes as long as it took before; a cell that never ran as many times its least (its
    start and its window) as others took."""

    def __init__(self, plan: Plan) -> None:
        self._least_s = {cell.id: min(_window_s(plan, cell) + START_S, plan.file.timeout_s) for cell in plan.cells}
        self._left = {cell.id: plan.repeats_of(cell) for cell in plan.cells}
        self._took_s: dict[str, float] = {}

    def done(self, job: Job, run: RunRecord) -> None:
        """A run ended, now or at an earlier start."""
        cell, cost = job.cell.id, run.sweep and run.sweep.cost
        self._left[cell] -= 1
        if cost and cost.total_s is not None and (run.outcome == "ok" or cell not in self._took_s):
            self._took_s[cell] = cost.total_s

    def left_s(self, elapsed_s: float = 0.0) -> float:
        """Seconds until the end, where the present run has taken `elapsed_s` so far."""
        ratios = [took_s / self._least_s[cell] for cell, took_s in self._took_s.items()]
        factor = fmean(ratios) if ratios else 1.0
        total_s = sum(
            count * self._took_s.get(cell, self._least_s[cell] * factor) for cell, count in self._left.items()
        )
        return max(0.0, total_s - elapsed_s)


class Progress:
    """Lines on standard error, on a terminal with a bar below them; they never end a sweep."""

    def __init__(self, plan: Plan, stream: TextIO | None = None) -> None:
        # Nobody knows how many rounds two sides will take, or how many trials a search.
        self.is_open = bool(plan.file.sides or plan.file.largest)
        self.total = plan.job_count
        self.outcomes: Counter[str] = Counter()
        self._estimate = Estimate(plan)
        self._command = "compare" if plan.file.sides else "sweep"
        self._kept = 0
        self._last_beat_s = 0.0
        # By reason, the run that was the first to tell it.
        self._reasons: dict[str, str] = {}
        self._console = make_console(stream or sys.stderr)
        # Drawn when a run says that it goes on: a thread that draws would disturb what is measured.
        self._bar = Bar(
            BarColumn(20), TextColumn("{task.description}", markup=False), console=self._console, transient=True,
            auto_refresh=False, redirect_stdout=False, redirect_stderr=False, disable=not self._console.is_interactive,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None if self.is_open else self.total)

    def kept(self, job: Job, run: RunRecord) -> None:
        """A run of an earlier start of the sweep counts."""
        self._kept += 1
        self._count(job, run)

    def said(self, text: str) -> None:
        """Something to know, in one line."""
        self._write(f"lmbench: {self._command}: {one_line(masked_message(text))}")

    def noted(self, text: str) -> None:
        """Something that goes on; on a terminal the next line takes its place."""
        if self._bar.disable:
            self.said(text)
            return
        self._bar.update(self._task, description=one_line(text), completed=self.outcomes.total())
        with suppress(OSError, ValueError):
            self._bar.start()
            self._bar.refresh()

    def running(self, job: Job, elapsed_s: float) -> None:
        """A run goes on."""
        if not self._bar.disable or elapsed_s - self._last_beat_s >= _HEARTBEAT_S:
            self._last_beat_s = elapsed_s
            self.noted(f"{self._place(1, elapsed_s)}  running for {duration(elapsed_s)}  {job.name}")

    def ended(self, job: Job, run: RunRecord) -> None:
        """A run ended, and why where it did not end well; what an earlier run has told is not told again."""
        if self._kept:
            self.said(f"{self._kept} runs were done before")
        self._kept, self._last_beat_s = 0, 0.0
        self._count(job, run)
        self._write(f"{self._place()}  {shown(_in_words(run))}  {shown(job.name)}")
        if run.outcome not in ("ok", "skipped") and run.error is not None:
            message = textwrap.shorten(one_line(run.error.message or ""), 2 * _WIDTH, placeholder=" ...")
            first = self._reasons.setdefault(message, job.name)
            reason = message if first == job.name else f"as {first}"
            self._write(textwrap.fill(reason, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT))

    def close(self) -> None:
        """Take the bar away; may be called again."""
        with suppress(OSError, ValueError):
            self._bar.stop()

    def _count(self, job: Job, run: RunRecord) -> None:
        self.outcomes[run.outcome] += 1
        if not self.is_open:
            self._estimate.done(job, run)

    def _place(self, offset: int = 0, elapsed_s: float = 0.0) -> str:
        index = self.outcomes.total() + offset
        if self.is_open:
            return f"[{index}]"
        left = f"{duration(self._estimate.left_s(elapsed_s))} left"
        return f"[{index:>{len(str(self.total))}}/{self.total}] {left:>12}"

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._console.print(text)


def announcement(plan: Plan) -> str:
    """What a sweep will take, as far as that is known before anything has run."""
    if plan.file.sides:
        return "two sides in turn, in rounds until the verdict stands"
    if (spec := plan.file.largest) is not None:
        return f"cells: {len(plan.cells)}, each tried with one {spec.option} after the other until the largest fits"
    least_s, most_s = Estimate(plan).left_s(), plan.job_count * plan.file.timeout_s
    return (
        f"cells: {len(plan.cells)}, repeats: {plan.file.repeats}, runs: {plan.job_count}; "
        f"at least about {duration(least_s)} (windows and starts), at most {duration(most_s)} (time limits)"
    )


def _in_words(run: RunRecord) -> str:
    """How a run ended."""
    if run.outcome == "ok":
        step = run.phases.step
        return "ok" if step is None or step.mean_s is None else f"ok {step.mean_s * 1e3:.4g} ms/step"
    phase = None if run.error is None else run.error.phase
    return f"{run.outcome} in {phase}" if phase and run.outcome != "skipped" else run.outcome


def _window_s(plan: Plan, cell: GridCell) -> float:
    """The least time of a cell's window, by its options or its configuration."""
    seconds = cell.options.get("measure.min_window_s")
    if seconds is None and cell.config is not None:
        seconds = _configured_window(plan.configs[cell.config])
    with suppress(TypeError, ValueError):
        return float(str(seconds))
    return _MIN_WINDOW_S


@cache
def _configured_window(config: str) -> Any:
    with suppress(AttributeError):
        return parse_yaml(config, "config").get("measure").get("min_window_s")
