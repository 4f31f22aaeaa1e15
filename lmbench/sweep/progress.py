"""What a sweep says while it runs: a line for every run that ended, what goes on now, and how long it will take."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from statistics import fmean
from typing import TextIO

from lmbench.configs import parse_yaml
from lmbench.masking import masked_message
from lmbench.progress import StatusLine
from lmbench.records.measured import RunError
from lmbench.records.run import RunRecord
from lmbench.report.units import duration
from lmbench.sweep.local import START_S
from lmbench.sweep.plan import Job, Plan
from lmbench.text import one_line, shown

_WIDTH = 80
_INDENT = " " * 8
# `lmbench fit`'s own, where neither file nor command line says otherwise.
_MIN_WINDOW_S = 3.0


class Progress:
    """Lines on standard error, with one below them for what goes on; they never end a sweep."""

    def __init__(self, plan: Plan, stream: TextIO | None = None, name: str = "") -> None:
        # None where nobody knows: how many rounds two sides take, or how many trials a search.
        self.total = None if plan.file.sides or plan.file.largest else len(plan.jobs())
        self.outcomes: Counter[str] = Counter()
        self._name = name or ("compare" if plan.file.sides else "sweep")
        self._costs_s: list[float] = []
        self._reasons: set[str] = set()
        self._line = StatusLine(stream)

    def said(self, text: str) -> None:
        """Something to know, in one line."""
        self._line.keep(f"lmbench: {self._name}: {one_line(masked_message(text))}")

    def noted(self, text: str) -> None:
        """Something that goes on; the next line takes its place."""
        self._line.show(text)

    def running(self, job: Job, elapsed_s: float) -> None:
        """A run goes on."""
        self.noted(f"{self._place(1, elapsed_s)}  running for {duration(elapsed_s)}  {job.name}")

    def kept(self, run: RunRecord) -> None:
        """A run of an earlier start of the sweep counts."""
        self.outcomes[run.outcome] += 1
        if (cost := run.sweep and run.sweep.cost) and cost.total_s is not None:
            self._costs_s.append(cost.total_s)

    def ended(self, job: Job, run: RunRecord) -> None:
        """A run ended, and why where it did not end well; the same reason is told once."""
        self.kept(run)
        self._line.restart()
        ending, step, error = run.outcome, run.phases.step, run.error or RunError()
        is_fine = ending in ("ok", "skipped")
        if ending == "ok" and step is not None and step.mean_s is not None:
            ending = f"ok {step.mean_s * 1e3:.4g} ms/step"
        elif not is_fine and error.phase:
            ending = f"{ending} in {error.phase}"
        self._line.keep(f"{self._place()}  {shown(ending)}  {shown(job.name)}")
        message = one_line(error.message or "")
        if not is_fine and message not in self._reasons:
            self._reasons.add(message)
            message = textwrap.shorten(message, 2 * _WIDTH, placeholder=" ...")
            self._line.keep(textwrap.fill(message, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT))

    def close(self) -> None:
        """Take the line away; may be called again."""
        self._line.clear()

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


def announcement(plan: Plan) -> str:
    """What a sweep will take, as far as that is known before anything has run."""
    if plan.file.sides:
        return "two sides in turn, in rounds until the verdict stands"
    if (spec := plan.file.largest) is not None:
        return f"cells: {len(plan.cells)}, each tried with one {spec.option} after the other until the largest fits"
    return (
        f"cells: {len(plan.cells)}, repeats: {plan.file.repeats}, runs: {len(plan.jobs())}; at least about "
        f"{duration(len(plan.jobs()) * least_s(plan))} (windows and starts), "
        f"at most {duration(len(plan.jobs()) * plan.file.timeout_s)} (time limits)"
    )


def least_s(plan: Plan) -> float:
    """Seconds that a run takes on average if it takes no more than its start and its window."""
    configured = {name: parse_yaml(text, name).get("measure") or {} for name, text in plan.configs.items()}
    windows_s = []
    for cell in plan.cells:
        settings = {"measure.min_window_s": configured.get(cell.config or "", {}).get("min_window_s"), **cell.options}
        window = str(settings["measure.min_window_s"])
        # A value that is no number is refused by the command line.
        windows_s.append(float(window) if re.fullmatch(r"[\d.]+", window) else _MIN_WINDOW_S)
    return min(fmean(windows_s) + START_S, plan.file.timeout_s)
