"""What a sweep says while it runs: a line for every run that ended, and on a terminal what goes on now."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from contextlib import suppress
from typing import TextIO

from lmbench.results.paths import number
from lmbench.results.vocabulary import Record
from lmbench.runner.estimate import Estimate, duration
from lmbench.runner.plan import Job, Plan


class Progress:
    """Lines on standard error; they never end a sweep, even where nobody reads them any more."""

    def __init__(self, plan: Plan, estimate: Estimate, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_live = self._stream.isatty()
        self._estimate = estimate
        self.total = len(plan.cells) * plan.file.repeats
        self._done = 0
        self.outcomes: Counter[str] = Counter()

    def kept(self, job: Job, run: Record) -> None:
        """A run of an earlier start of the sweep counts."""
        self._count(job, run)

    def said(self, text: str) -> None:
        """Something to know, in one line."""
        self._write(f"lmbench: sweep: {text}\n")

    def running(self, job: Job, elapsed_s: float) -> None:
        if self._is_live:
            line = f"[{self._done + 1}/{self.total}] {job.name}, {duration(elapsed_s)}{self._left(elapsed_s)}"
            width = shutil.get_terminal_size((80, 24)).columns
            self._write(line[: width - 1])

    def ended(self, job: Job, run: Record) -> None:
        self._count(job, run)
        number_ = f"[{self._done:>{len(str(self.total))}}/{self.total}]"
        self._write(f"{number_} {job.name}  {_told(run)}{self._left()}\n")

    def close(self) -> None:
        """Leave the terminal's line as it was found."""
        if self._is_live:
            self._write("")

    def _count(self, job: Job, run: Record) -> None:
        self._done += 1
        self.outcomes[str(run.get("outcome"))] += 1
        self._estimate.done(job, run)

    def _left(self, elapsed_s: float = 0.0) -> str:
        left_s = self._estimate.left_s(elapsed_s)
        return "" if left_s <= 0 else f", about {duration(left_s)} left"

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(f"\r\x1b[K{text}" if self._is_live else text)
            self._stream.flush()


def _told(run: Record) -> str:
    """A run in a few words."""
    error = run.get("error") or {}
    if run.get("outcome") != "ok":
        where = f" in {error['phase']}" if error.get("phase") else ""
        return f"{run.get('outcome')}{where}: {str(error.get('message'))[:160]}"
    step_s, total_s = number(run, "phases.step.mean_s"), number(run, "sweep.cost.total_s")
    parts = ["ok", f"{step_s * 1e3:.4g} ms/step" if step_s is not None else ""]
    return "  ".join(filter(None, [*parts, f"in {duration(total_s)}" if total_s is not None else ""]))
