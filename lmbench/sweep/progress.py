"""What a sweep says while it runs: a line for every run that ended, what goes on now, and how long it will take."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections import Counter
from contextlib import suppress
from typing import Any, TextIO

from lmbench.configs import parse_yaml
from lmbench.masking import masked_message
from lmbench.records.run import RunRecord
from lmbench.report.units import duration
from lmbench.sweep.plan import GridCell, Job, Plan
from lmbench.sweep.servers import START_S
from lmbench.text import one_line, shown

_WIDTH = 80
_INDENT = " " * 8
#: Where nothing can be overwritten (a log file), a run that takes long is told of as often as this.
_HEARTBEAT_S = 60.0
# `lmbench fit`'s own, where neither file nor command line says otherwise.
_MIN_WINDOW_S = 3.0


class Estimate:
    """The time that is left. A cell takes as long as it took before; one that never ran as long as others took, or
    at least its start and its window."""

    def __init__(self, plan: Plan) -> None:
        most_s = plan.file.timeout_s
        configured = {name: _configured_s(text) for name, text in plan.configs.items()}
        self._least_s = {
            cell.id: min(_window_s(cell, configured.get(cell.config or "")) + START_S, most_s) for cell in plan.cells
        }
        self._left = {cell.id: plan.repeats_of(cell) for cell in plan.cells}
        self._took_s: dict[str, float] = {}
        # Sums, since they are asked for after every run: of cells that ran, and of those that did not.
        self._known_left_s = 0.0
        self._unknown_left_s = sum(self._least_s[cell] * left for cell, left in self._left.items())
        self._factors = 0.0

    def done(self, job: Job, run: RunRecord) -> None:
        """A run ended, now or at an earlier start."""
        cell = job.cell.id
        took_s, left = self._took_s.get(cell), self._left[cell]
        if took_s is None:
            self._unknown_left_s -= self._least_s[cell] * left
        else:
            self._known_left_s -= took_s * left
            self._factors -= took_s / self._least_s[cell]
        self._left[cell] = left = left - 1
        cost = None if run.sweep is None else run.sweep.cost
        if cost is not None and cost.total_s is not None and (run.outcome == "ok" or took_s is None):
            took_s = self._took_s[cell] = cost.total_s
        if took_s is None:
            self._unknown_left_s += self._least_s[cell] * left
        else:
            self._known_left_s += took_s * left
            self._factors += took_s / self._least_s[cell]

    def left_s(self, elapsed_s: float = 0.0) -> float:
        """Seconds until the end, where the present run has taken `elapsed_s` so far."""
        factor = self._factors / len(self._took_s) if self._took_s else 1.0
        return max(0.0, self._known_left_s + self._unknown_left_s * factor - elapsed_s)


class Progress:
    """Lines on standard error; they never end a sweep, even where nobody reads them any more."""

    def __init__(self, plan: Plan, estimate: Estimate, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        # Nobody knows how many rounds two sides will take, or how many trials a search.
        self.is_open = bool(plan.file.sides or plan.file.largest)
        self._command = "compare" if plan.file.sides else "sweep"
        self._is_live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._estimate = estimate
        self._plan = plan
        self.total = plan.job_count
        self._done = 0
        self._kept = 0
        self._told_s = 0.0
        self.outcomes: Counter[str] = Counter()
        # By reason, the run that was the first to tell it.
        self._reasons: dict[str, str] = {}

    def begin(self) -> None:
        """What the sweep will take, as far as that is known before anything has run."""
        if self._plan.file.sides:
            self.said("two sides in turn, in rounds until the verdict stands")
            return
        if (spec := self._plan.file.largest) is not None:
            cells = _count_of(len(self._plan.cells), "cell")
            self.said(
                f"{cells}, each tried with one {spec.option} after the other until the largest that fits is known"
            )
            return
        self.said(f"{extent(self._plan)}: {cost(self._plan, self._estimate)}")

    def kept(self, job: Job, run: RunRecord) -> None:
        """A run of an earlier start of the sweep counts."""
        self._kept += 1
        self._count(job, run)

    def said(self, text: str) -> None:
        """Something to know, in one line."""
        self._write(f"lmbench: {self._command}: {one_line(masked_message(text))}\n")

    def running(self, job: Job, elapsed_s: float) -> None:
        line = f"{self._place(self._done + 1, elapsed_s)}  running for {duration(elapsed_s)}  {shown(job.name)}"
        if self._is_live:
            width = shutil.get_terminal_size((_WIDTH, 24)).columns
            self._write(line[: width - 1])
        elif elapsed_s - self._told_s >= _HEARTBEAT_S:
            self._told_s = elapsed_s
            self._write(f"{line}\n")

    def ended(self, job: Job, run: RunRecord) -> None:
        if self._kept:
            self.said(f"{self._kept} runs were done before")
            self._kept = 0
        self._count(job, run)
        self._told_s = 0.0
        self._write(f"{self._place(self._done)}  {shown(_told(run))}  {shown(job.name)}\n{self._reason(job, run)}")

    def noted(self, text: str) -> None:
        """Something that goes on; the next line takes its place where that can be."""
        self._write(one_line(text) if self._is_live else f"lmbench: {self._command}: {one_line(text)}\n")

    def close(self) -> None:
        """Leave the terminal's line as it was found."""
        if self._is_live:
            self._write("")

    def _count(self, job: Job, run: RunRecord) -> None:
        self._done += 1
        self.outcomes[run.outcome] += 1
        if not self.is_open:
            self._estimate.done(job, run)

    def _reason(self, job: Job, run: RunRecord) -> str:
        """Why it did not end well, on lines of its own; what an earlier run has told is not told again."""
        if run.outcome in ("ok", "skipped") or run.error is None:
            return ""
        message = textwrap.shorten(one_line(run.error.message or ""), 2 * _WIDTH, placeholder=" ...")
        first = self._reasons.setdefault(message, job.name)
        if first != job.name:
            message = f"as {first}"
        return textwrap.fill(message, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT) + "\n"

    def _place(self, index: int, elapsed_s: float = 0.0) -> str:
        if self.is_open:
            return f"[{index}]"
        left = f"{duration(self._estimate.left_s(elapsed_s))} left"
        return f"[{index:>{len(str(self.total))}}/{self.total}] {left:>12}"

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(f"\r\x1b[K{text}" if self._is_live else text)
            self._stream.flush()


def extent(plan: Plan) -> str:
    """How many cells, repeats and runs."""
    cells, repeats = len(plan.cells), plan.file.repeats
    return f"{_count_of(cells, 'cell')}, {_count_of(repeats, 'repeat')} each: {_count_of(plan.job_count, 'run')}"


def cost(plan: Plan, estimate: Estimate) -> str:
    """How long that takes, before anything has run."""
    most_s = plan.job_count * plan.file.timeout_s
    return (
        f"at least about {duration(estimate.left_s())} (windows and starts), at most {duration(most_s)} (time limits)"
    )


def _count_of(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _told(run: RunRecord) -> str:
    """A run in a few words."""
    if run.outcome == "ok":
        step = run.phases.step
        return "ok" if step is None or step.mean_s is None else f"ok {step.mean_s * 1e3:.4g} ms/step"
    phase = None if run.error is None else run.error.phase
    return f"{run.outcome} in {phase}" if phase and run.outcome != "skipped" else run.outcome


def _configured_s(config: str) -> Any:
    measure = parse_yaml(config, "config").get("measure")
    return measure.get("min_window_s") if isinstance(measure, dict) else None


def _window_s(cell: GridCell, configured: Any) -> float:
    given = cell.options.get("measure.min_window_s", configured)
    try:
        return _MIN_WINDOW_S if given is None else float(given)
    except (TypeError, ValueError):
        return _MIN_WINDOW_S
