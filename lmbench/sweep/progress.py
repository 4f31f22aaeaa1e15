"""What a sweep says while it runs: a line for every run that ended, and what goes on now."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from contextlib import suppress
from typing import TextIO

from lmbench.records.paths import number
from lmbench.records.vocabulary import Record
from lmbench.sweep.estimate import Estimate, duration
from lmbench.sweep.plan import Job, Plan

_WIDTH = 80
_INDENT = " " * 8
#: Where nothing can be overwritten (a log file), a run that takes long is told of as often as this.
_HEARTBEAT_S = 60.0


class Progress:
    """Lines on standard error; they never end a sweep, even where nobody reads them any more."""

    def __init__(self, plan: Plan, estimate: Estimate, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_live = self._stream.isatty()
        self._estimate = estimate
        self._plan = plan
        self.total = plan.job_count
        self._done = 0
        self._kept = 0
        self._told_s = 0.0
        self.outcomes: Counter[str] = Counter()

    def begin(self) -> None:
        """What the sweep will take, as far as that is known before anything has run."""
        self.said(f"{extent(self._plan)}: {cost(self._plan, self._estimate)}")

    def kept(self, job: Job, run: Record) -> None:
        """A run of an earlier start of the sweep counts."""
        self._kept += 1
        self._count(job, run)

    def said(self, text: str) -> None:
        """Something to know, in one line."""
        self._write(f"lmbench: sweep: {text}\n")

    def running(self, job: Job, elapsed_s: float) -> None:
        line = f"{self._place(self._done + 1, elapsed_s)}  running for {duration(elapsed_s)}  {job.name}"
        if self._is_live:
            width = shutil.get_terminal_size((_WIDTH, 24)).columns
            self._write(line[: width - 1])
        elif elapsed_s - self._told_s >= _HEARTBEAT_S:
            self._told_s = elapsed_s
            self._write(f"{line}\n")

    def ended(self, job: Job, run: Record) -> None:
        if self._kept:
            self.said(f"{self._kept} runs were done before")
            self._kept = 0
        self._count(job, run)
        self._told_s = 0.0
        self._write(f"{self._place(self._done)}  {_told(run)}  {job.name}\n{_reason(run)}")

    def noted(self, text: str) -> None:
        """Something that goes on; the next line takes its place where that can be."""
        self._write(text if self._is_live else f"lmbench: sweep: {text}\n")

    def close(self) -> None:
        """Leave the terminal's line as it was found."""
        if self._is_live:
            self._write("")

    def _count(self, job: Job, run: Record) -> None:
        self._done += 1
        self.outcomes[str(run.get("outcome"))] += 1
        self._estimate.done(job, run)

    def _place(self, index: int, elapsed_s: float = 0.0) -> str:
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


def _count_of(number_: int, word: str) -> str:
    return f"{number_} {word}" + ("" if number_ == 1 else "s")


def _told(run: Record) -> str:
    """A run in a few words."""
    outcome = str(run.get("outcome"))
    if outcome == "ok":
        step_s = number(run, "phases.step.mean_s")
        return "ok" if step_s is None else f"ok {step_s * 1e3:.4g} ms/step"
    phase = (run.get("error") or {}).get("phase")
    return f"{outcome} in {phase}" if phase and outcome != "skipped" else outcome


def _reason(run: Record) -> str:
    """Why it did not end well, on lines of its own; repeat 0 has told why others were skipped."""
    if run.get("outcome") in ("ok", "skipped"):
        return ""
    message = textwrap.shorten(str((run.get("error") or {}).get("message")), 2 * _WIDTH, placeholder=" ...")
    return textwrap.fill(message, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT) + "\n"
