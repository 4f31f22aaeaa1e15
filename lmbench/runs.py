"""Results as Python objects: reading them, showing them, and turning them into a `pandas.DataFrame`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmbench.records import load as _load
from lmbench.records.codec import as_dict
from lmbench.records.named import find_result
from lmbench.records.schema import fields, recorded
from lmbench.records.vocabulary import DAMAGED, KILLED, RUNNING
from lmbench.report.answer import Answer, Line, labelled
from lmbench.report.page import notebook_html
from lmbench.report.render import render
from lmbench.report.run import run_answer
from lmbench.report.units import milliseconds

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Run(_load.StoredRun):
    """A run as it was read; `print(run)` shows it like `lmbench show`, a notebook shows it as a table.

    `record` is its run.json (`record.throughput.tokens_per_s`, `record.phases.forward.mean_s`); `lmbench fields` lists
    every field. `steps` are its step records, `outcome` is how it ended. `path` is its folder, which no longer exists
    if the run was not to be kept.
    """

    def answer(self) -> Answer:
        """The answer of `lmbench show` for this run."""
        return run_answer(self.record, self.path if self.path.is_dir() else None, notes(self))

    def __str__(self) -> str:
        return render(self.answer(), "terminal").strip("\n")

    def __repr__(self) -> str:
        mean_s = self.record.step.mean_s
        mean = f", {milliseconds(mean_s)} ms a step" if mean_s is not None else ""
        return f"<lmbench.Run {self.run_id}: {self.outcome}{mean}>"

    def _repr_html_(self) -> str:
        return notebook_html(self.answer())


def load(path: str | Path, *, with_steps: bool = True) -> list[Run]:
    """Every run at or below a folder, such as that of a sweep, sorted by name; `damage` says what could not be read.

    As on the command line, `path` may be `last`, `last~1`, or a name that the user gave to a result.

    Raises:
        UsageError: the folder does not exist, has no result, or has one of another version of lmbench.
    """
    return [read_run(folder, with_steps) for folder in _load.find_runs([find_result(str(path))])]


def read_run(folder: Path, with_steps: bool = True) -> Run:
    """Read a run's folder. `record.outcome` is `killed` where run.json says `running` and the process is gone."""
    run = _load.load_run(folder, with_steps)
    run.record.outcome = run.outcome
    return Run(**vars(run))


def notes(run: _load.StoredRun) -> list[Line]:
    """Lines about a run that did not end (its number of steps), and about files that could not be read."""
    lines = []
    if run.outcome in (RUNNING, KILLED, DAMAGED):
        summary = "" if run.outcome == DAMAGED else ", without a summary: the run was not closed"
        lines.append(Line("steps", f"{len(run.steps)} recorded{summary}"))
    return [*lines, *labelled("damage", run.damage)]


def to_frame(runs: _load.StoredRun | Iterable[_load.StoredRun], *, steps: bool = False) -> pandas.DataFrame:
    """Runs as a `pandas.DataFrame`, with a row for each run or, with `steps`, for each step.

    Columns are the record's fields by their dotted names (`throughput.tokens_per_s`, `config.data.batch_size`), in SI
    units. Lists are left out of the rows of runs. A field of the schema that no run has is empty.
    """
    import pandas as pd

    runs = [runs] if isinstance(runs, _load.StoredRun) else runs
    if steps:
        return pd.DataFrame([{"run_id": run.run_id, **as_dict(step)} for run in runs for step in run.steps])
    rows = [
        {"run_id": run.run_id} | {name: v for name, v in recorded(run.record).items() if not isinstance(v, list)}
        for run in runs
    ]
    frame = pd.DataFrame(rows)
    columns = [*frame]
    missing = [name for name in fields("run") if not any(f"{column}.".startswith(f"{name}.") for column in columns)]
    return frame.reindex(columns=[*columns, *missing])
