"""What a sweep says while it runs: a line for every run that ended, what goes on now, and how long it will take."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping

from lmbench.progress import Task
from lmbench.records.measured import RunError
from lmbench.records.run import RunRecord
from lmbench.report.units import duration
from lmbench.sweep.plan import Job, Plan

_MOST_REASON = 160


class Progress(Task):
    """Lines on standard error, with one below them for what goes on; they never end a sweep.

    Of a part of something larger `names` are those of its cells, by their ids: only the ends of runs are told then.
    """

    def __init__(self, plan: Plan, name: str = "", names: Mapping[str, str] | None = None) -> None:
        self._names = names
        # None where nobody knows: how many rounds two sides take, or how many trials a search.
        self.total = None if plan.file.sides or plan.file.largest else len(plan.jobs())
        super().__init__(name or ("compare" if plan.file.sides else "sweep"), self.total)
        self.outcomes: Counter[str] = Counter()

    def announce(self, text: str) -> None:
        """What is to come."""
        self.keep(text) if self._names is None else self.line.show(text)

    def kept(self, run: RunRecord) -> None:
        """A run of an earlier start of the sweep counts, and takes no time now."""
        self.outcomes[run.outcome] += 1
        self.leave_out()

    def ended(self, job: Job, run: RunRecord) -> None:
        """A run ended, and why where it did not end well."""
        self.outcomes[run.outcome] += 1
        self.line.restart()
        ending, step, error = run.outcome, run.phases.step, run.error or RunError()
        if ending == "ok" and step is not None and step.mean_s is not None:
            ending = f"ok {step.mean_s * 1e3:.4g} ms/step"
        elif ending not in ("ok", "skipped"):
            ending += f" in {error.phase}" if error.phase else ""
            ending += f": {textwrap.shorten(error.message or '', _MOST_REASON, placeholder=' ...')}"
        count = f"{self.outcomes.total()}{'' if self.total is None else f' of {self.total}'}"
        self.keep(f"{count}: {(self._names or {}).get(job.cell.id, job.name)}: {ending}")


def announcement(plan: Plan) -> str:
    """What a sweep will take, as far as that is known before anything has run."""
    if plan.file.sides:
        return "two sides in turn, in rounds until the verdict stands"
    if (spec := plan.file.largest) is not None:
        return f"cells: {len(plan.cells)}, each tried with one {spec.option} after the other until the largest fits"
    return (
        f"cells: {len(plan.cells)}, repeats: {plan.file.repeats}, runs: {len(plan.jobs())}; "
        f"at most {duration(len(plan.jobs()) * plan.file.timeout_s)} (time limits)"
    )
