"""Progress of a sweep: a line for every run that ended, one for the run going on, and the time that is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from lmbench.progress import Task
from lmbench.records.run import RunRecord
from lmbench.report.units import duration
from lmbench.sweep.plan import Job, Plan


class SweepProgress(Task):
    """Lines on standard error for the runs of a plan, with the status line below them.

    A stage of `lmbench tune` gives `names` for its cells, by their ids. Only ends of runs stay on the screen then.
    """

    def __init__(self, plan: Plan, title: str = "", names: Mapping[str, str] | None = None) -> None:
        self._names = names or {}
        # The number of runs may be open: two sides take rounds, and a search trials, until they know enough.
        total = None if plan.file.sides or plan.file.largest else len(plan.jobs())
        super().__init__(title or ("compare" if plan.file.sides else "sweep"), total)
        #: How many runs ended with an outcome and an exit code.
        self.ends: Counter[tuple[str, int | None]] = Counter()

    @property
    def count(self) -> str:
        """The number of runs that ended, of how many where that is known: `3 of 8`."""
        ended = self.ends.total()
        return str(ended) if self.total is None else f"{ended} of {self.total}"

    def announce(self, text: str) -> None:
        """Say what comes next."""
        if self._names:
            self.line.show(text)
        else:
            self.keep(text)

    def count_earlier(self, run: RunRecord) -> None:
        """Count a run of an earlier start of the sweep, which takes no time now."""
        self.ends[run.outcome, run.exit_code] += 1
        if self.total:
            self.skip()

    def report_end(self, job: Job, run: RunRecord) -> None:
        """Count a run that ended, and write its outcome with its step time or the reason of its failure."""
        self.ends[run.outcome, run.exit_code] += 1
        self.line.restart()
        ending, mean_s = run.outcome, run.step.mean_s
        if ending == "ok" and mean_s is not None:
            ending = f"ok {mean_s * 1e3:.4g} ms/step"
        elif ending not in ("ok", "skipped"):
            ending = run.failure.ending(ending)
        self.keep(f"{self.count}: {self._names.get(job.cell.id, job.name)}: {ending}")


def announcement(plan: Plan) -> str:
    """How many runs a sweep takes and for how long, as far as that is known before the first run."""
    if plan.file.sides:
        return f"two sides in turn, at most {plan.file.repeats} rounds"
    if (spec := plan.file.largest) is not None:
        return f"cells: {len(plan.cells)}, each tried with one {spec.option} after the other until the largest fits"
    return (
        f"cells: {len(plan.cells)}, repeats: {plan.file.repeats}, runs: {len(plan.jobs())}; "
        f"at most {duration(len(plan.jobs()) * plan.file.timeout_s)} (time limits)"
    )
