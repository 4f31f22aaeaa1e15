"""The stages of a tuning or of a plan's proof: sweeps that share a folder and a budget."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from textwrap import shorten

from lmbench.campaign.sweep import Sweep
from lmbench.compare.comparability import differences_within
from lmbench.errors import UsageError
from lmbench.files import short_digest
from lmbench.python_process import SWEEP
from lmbench.records.load import StoredRun, is_run_folder, load_known
from lmbench.records.store import RUNS_FOLDER, TUNING_FILE, write_or_refuse
from lmbench.standard_output import result_alone
from lmbench.sweep.execute import CompileCache, Pace
from lmbench.sweep.file import Options, sweep_from
from lmbench.sweep.folder import is_trusted
from lmbench.sweep.local import LocalExecutor
from lmbench.sweep.plan import Job, make_plan

#: The largest fraction of the budget that a single run may take.
MOST_OF_ONE = 0.25
_SHORT = {"measure.steps": 10, "measure.min_window_s": 1.5, "measure.probe_steps": 0}
_LONG = {"measure.steps": 20, "measure.min_window_s": 3.0, "measure.probe_steps": 0}
#: The stage of the configuration as it was given.
GIVEN = "given"


@dataclass
class Stages:
    """The sweeps of a tuning, each in a folder below `path`. A run that is in its folder already is not repeated.

    The budget is in device time: the time of all processes, each from start to end. `most_bytes` is the memory that a
    run may reserve. `command` repeats the tuning, and stands in each sweep's folder.
    """

    path: Path
    base: Options
    budget_s: float
    most_bytes: int | None
    command: Sequence[str] = ()
    cache: CompileCache = field(default_factory=CompileCache)

    def __post_init__(self) -> None:
        #: The options of runs with short windows and with long ones, unless the user set the windows.
        self.short, self.long = {**_SHORT, **self.base}, {**_LONG, **self.base}
        # With the mark of a sweep, a run leaves it to the server to end what it started.
        self.executor = LocalExecutor({SWEEP: str(self.path)}, is_lasting=True)

    def is_allowed(self, peak_bytes: int) -> bool:
        return self.most_bytes is None or peak_bytes <= self.most_bytes

    @contextmanager
    def begun(self, trusts: bool) -> Iterator[None]:
        """Make the folder, or go on with one that this user began or trusts. The servers end with the block.

        Raises:
            UsageError: the folder is another user's, or cannot be written.
        """
        token = self.path / TUNING_FILE
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            names = sorted(path.name for path in self.path.iterdir())
            if not names:
                # Another folder may get the inode of one that was removed.
                token.write_text(secrets.token_hex())
            contents = {TUNING_FILE: token.read_bytes()} if token.is_file() else {}
        except OSError as error:
            raise UsageError(f"{str(self.path)!r} cannot be written: {error.strerror}; give another --name") from error
        if not is_trusted(self.path, contents, adds=trusts or not names) and names:
            its_files = shorten(", ".join(names), 200, placeholder=" ...")
            raise UsageError(
                f"{self.path} was not begun here by you: it would take {its_files} for its own; nothing was run; "
                "--trust takes it over, another --name begins anew"
            )
        with result_alone(), closing(self.executor):
            yield

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder. Raises UsageError where that fails."""
        write_or_refuse(self.path / name, text, "remove it")

    def costs_s(self, *stages: str) -> list[float]:
        """The device time of every run so far, or of those in stage folders that match these patterns."""
        return [cost_s for run in self.runs(*stages) if (cost_s := run.record.cost_s)]

    def runs(self, *stages: str) -> list[StoredRun]:
        """Every run so far, or those in stage folders that match these patterns."""
        files = (self.path.glob(f"{stage}/{RUNS_FOLDER}/*/run.json") for stage in stages or ("*",))
        return [load_known(file.parent) for file in chain.from_iterable(files)]

    def folder(self, stage: str, cells: Iterable[str]) -> Path:
        """The folder of a stage over these cells. Its name has their hash: another budget or space may change them."""
        return self.path / f"{stage}-{short_digest(' '.join(cells), 6)}"

    def measure(
        self, stage: str, base: Options, points: Mapping[str, Options], until: float, repeats: int = 1
    ) -> list[list[StoredRun]]:
        """Measure points, given as options by name; returns the runs of each point.

        Args:
            stage: the beginning of the folder's name.
            base: options of all points.
            points: the options of each point, added to those of the base.
            until: the fraction of the budget after which no run may end; one that would is not started.
            repeats: processes for each point.
        """
        plan = make_plan(stage, sweep_from({"base": base, "include": list(points.values()), "repeats": repeats}))
        plan = replace(plan, command=self.command)
        names = {cell.id: name for cell, name in zip(plan.cells, points, strict=True)}
        path = self.folder(stage, (cell.id for cell in plan.cells))
        if stage == GIVEN and {*self.path.glob(f"{GIVEN}-*")} - {path}:
            raise UsageError(f"{self.path} is the tuning of other options; give this one a --name of its own")
        pace = self.pace(path, until)
        if not pace.left_s() and not path.is_dir():
            return [[] for _ in plan.cells]
        # Each round that decides needs a server of its own, so that repeats differ in hash seed and address layout.
        pace.executor = None if stage.startswith(("finals", "fallback", "rest")) else self.executor
        # A trial's value that the command line refuses is that trial's failure.
        Sweep(plan, path, f"tune: {stage}", names, pace, is_checked=stage == GIVEN).carry_out()
        folders = [[path / RUNS_FOLDER / Job(cell, repeat).name for repeat in range(repeats)] for cell in plan.cells]
        measured = [[load_known(run) for run in runs if is_run_folder(run)] for runs in folders]
        if changed := differences_within([*self.runs(f"{GIVEN}-*"), *chain.from_iterable(measured)], ()):
            raise UsageError(f"{self.path} has runs of other code: {changed[0]}; begin anew with another --name")
        return measured

    def pace(self, path: Path, until: float) -> Pace:
        """The pace of a stage's runs: none starts that would end after this part of the budget.

        A run is expected to take as long as the stage's runs so far, or, for its first one, as all stages' runs.
        """

        def left_s() -> float:
            costs_s = self.costs_s()
            usual_s = statistics.fmean(self.costs_s(path.name) or costs_s or [0.0])
            rest_s = self.budget_s - sum(costs_s)
            is_late = rest_s - usual_s < (1 - until) * self.budget_s
            return 0.0 if is_late else min(rest_s, MOST_OF_ONE * self.budget_s)

        return Pace(left_s=left_s, cache=self.cache)
