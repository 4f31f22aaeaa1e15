"""What a sweep says while it runs: a line for every run that ended, what goes on now, and how long it will take."""

from __future__ import annotations

import re
import sys
import textwrap
from collections import Counter
from contextlib import suppress
from statistics import fmean
from typing import TextIO

from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from lmbench.configs import parse_yaml
from lmbench.masking import masked_message
from lmbench.records.run import RunRecord
from lmbench.report.console import make_console
from lmbench.report.units import duration
from lmbench.sweep.local import START_S
from lmbench.sweep.plan import Job, Plan
from lmbench.text import one_line, shown

_WIDTH = 80
_INDENT = " " * 8
#: Where nothing can be overwritten (a log file), a run that takes long is told of as often as this.
_HEARTBEAT_S = 60.0
# `lmbench fit`'s own, where neither file nor command line says otherwise.
_MIN_WINDOW_S = 3.0


class Progress:
    """Lines on standard error, on a terminal with a bar below them; they never end a sweep."""

    def __init__(self, plan: Plan, stream: TextIO | None = None) -> None:
        # None where nobody knows: how many rounds two sides take, or how many trials a search.
        self.total = None if plan.file.sides or plan.file.largest else plan.job_count
        self.outcomes: Counter[str] = Counter()
        self._command = "compare" if plan.file.sides else "sweep"
        self._costs_s: list[float] = []
        self._last_beat_s = 0.0
        self._reasons: set[str] = set()
        self._console = make_console(stream or sys.stderr)
        # Drawn when a run says that it goes on: a thread that draws would disturb what is measured.
        self._bar = Bar(
            BarColumn(20), TextColumn("{task.description}", markup=False), console=self._console, transient=True,
            auto_refresh=False, redirect_stdout=False, redirect_stderr=False, disable=not self._console.is_interactive,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=self.total)

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

    def kept(self, run: RunRecord) -> None:
        """A run of an earlier start of the sweep counts."""
        self.outcomes[run.outcome] += 1
        if run.sweep is not None and run.sweep.cost is not None and run.sweep.cost.total_s is not None:
            self._costs_s.append(run.sweep.cost.total_s)

    def ended(self, job: Job, run: RunRecord) -> None:
        """A run ended, and why where it did not end well; the same reason is told once."""
        self.kept(run)
        self._last_beat_s = 0.0
        ending, step, error = run.outcome, run.phases.step, run.error
        if ending == "ok" and step is not None and step.mean_s is not None:
            ending = f"ok {step.mean_s * 1e3:.4g} ms/step"
        elif ending not in ("ok", "skipped") and error is not None and error.phase:
            ending = f"{ending} in {error.phase}"
        self._write(f"{self._place()}  {shown(ending)}  {shown(job.name)}")
        message = one_line(error.message or "") if error is not None else ""
        if run.outcome not in ("ok", "skipped") and message not in self._reasons:
            self._reasons.add(message)
            message = textwrap.shorten(message, 2 * _WIDTH, placeholder=" ...")
            self._write(textwrap.fill(message, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT))

    def close(self) -> None:
        """Take the bar away; may be called again."""
        with suppress(OSError, ValueError):
            self._bar.stop()

    def _place(self, offset: int = 0, elapsed_s: float = 0.0) -> str:
        """Which run of how many, and how long the others take if they take as long as those before on average."""
        count = self.outcomes.total()
        if self.total is None:
            return f"[{count + offset}]"
        place = f"[{count + offset:>{len(str(self.total))}}/{self.total}]"
        if not self._costs_s:
            return place
        left_s = max(0.0, (self.total - count) * fmean(self._costs_s) - elapsed_s)
        return f"{place} {f'{duration(left_s)} left':>12}"

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._console.print(text)


def announcement(plan: Plan) -> str:
    """What a sweep will take, as far as that is known before anything has run."""
    if plan.file.sides:
        return "two sides in turn, in rounds until the verdict stands"
    if (spec := plan.file.largest) is not None:
        return f"cells: {len(plan.cells)}, each tried with one {spec.option} after the other until the largest fits"
    return (
        f"cells: {len(plan.cells)}, repeats: {plan.file.repeats}, runs: {plan.job_count}; at least about "
        f"{duration(plan.job_count * least_s(plan))} (windows and starts), "
        f"at most {duration(plan.job_count * plan.file.timeout_s)} (time limits)"
    )


def least_s(plan: Plan) -> float:
    """Seconds that a run takes on average if it takes no more than its start and its window."""
    contents = {name: parse_yaml(text, name) for name, text in plan.configs.items()}
    windows_s = []
    for cell in plan.cells:
        configured = contents.get(cell.config or "", {}).get("measure") or {}
        window = cell.options.get("measure.min_window_s", configured.get("min_window_s", _MIN_WINDOW_S))
        # A value that is no number is refused by the command line.
        windows_s.append(float(window) if re.fullmatch(r"[\d.]+", str(window)) else _MIN_WINDOW_S)
    return min(fmean(windows_s) + START_S, plan.file.timeout_s)
