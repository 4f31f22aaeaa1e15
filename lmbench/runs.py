"""Results as Python objects: read, shown, and as a table of pandas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmbench.records import load as _load
from lmbench.records.codec import as_dict
from lmbench.records.named import find_result
from lmbench.records.schema import recorded
from lmbench.records.vocabulary import DAMAGED, KILLED, RUNNING
from lmbench.report.answer import Answer, Line
from lmbench.report.page import notebook_html
from lmbench.report.render import render
from lmbench.report.run import run_answer
from lmbench.report.units import milliseconds

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Run(_load.Run):
    """A run: `record` is its run.json (`record.throughput.tokens_per_s`, `record.phases.forward.mean_s`; every field is
    in `lmbench.records.run`), `steps` its steps, `outcome` how it ended, `path` its folder, which is gone where nothing
    was to be kept.

    `print(run)` shows what `lmbench show` does; a notebook shows it as a table.
    """

    def answer(self) -> Answer:
        """The run as `lmbench show` gives it."""
        path = self.path if self.path.is_dir() else None
        return run_answer(self.record, path, notes(self))

    def __str__(self) -> str:
        return render(self.answer(), "terminal").strip("\n")

    def __repr__(self) -> str:
        step = self.record.phases.step
        mean = f", {milliseconds(step.mean_s)} ms a step" if step is not None else ""
        return f"<lmbench.Run {self.run_id}: {self.outcome}{mean}>"

    def _repr_html_(self) -> str:
        return notebook_html(self.answer())


def load(path: str | Path, *, with_steps: bool = True) -> list[Run]:
    """Every run at or below a folder (also of a sweep), sorted by name; one that is damaged says so in `damage`.

    `last`, `last~1` or a name that was given to a result stands for it, as on the command line.

    Raises:
        UsageError: there is no such folder, no result in it, or one of another version of lmbench.
    """
    return [read_run(folder, with_steps) for folder in _load.find_runs([find_result(str(path))])]


def read_run(folder: Path, with_steps: bool = True) -> Run:
    """A run's folder. One that says `running` may have been killed; its record says what it is then."""
    run = _load.load_run(folder, with_steps)
    run.record.outcome = run.outcome
    return Run(**vars(run))


def notes(run: _load.Run) -> list[Line]:
    """What there is of a run that was never closed, and what of it cannot be read, as labelled lines."""
    lines = []
    if run.outcome in (RUNNING, KILLED, DAMAGED):
        summary = "" if run.outcome == DAMAGED else ", without a summary: the run was not closed"
        lines.append(Line("steps", f"{len(run.steps)} recorded{summary}"))
    if run.damage is not None:
        lines.append(Line("damage", run.damage))
    return lines


def to_frame(runs: _load.Run | Iterable[_load.Run], *, steps: bool = False) -> pandas.DataFrame:
    """Runs as a `pandas.DataFrame`, with a row for each run, or each step; columns are a record's fields by their
    dotted names (`throughput.tokens_per_s`, `config.data.batch_size`), in SI units. Lists are left out."""
    import pandas as pd

    chosen = [runs] if isinstance(runs, _load.Run) else list(runs)
    if steps:
        return pd.DataFrame([{"run_id": run.run_id, **as_dict(step)} for run in chosen for step in run.steps])
    rows = [
        {"run_id": run.run_id} | {name: v for name, v in recorded(run.record).items() if not isinstance(v, list)}
        for run in chosen
    ]
    return pd.DataFrame(rows)
