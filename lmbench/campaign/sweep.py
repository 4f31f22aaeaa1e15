"""A sweep from its plan to its results: checked, measured here or as tasks elsewhere, and published."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from lmbench.catalogue import make_catalogue
from lmbench.errors import ExitCode, Failure, UsageError
from lmbench.fit_options import check_options
from lmbench.masking import masked_words, shown
from lmbench.memory.forecast import Request, ask_forecast, gpu_for
from lmbench.python_process import ProcessFailed
from lmbench.records.load import find_runs
from lmbench.records.store import CELLS_FILE, write_whole
from lmbench.report.render import render
from lmbench.report.results import read_sections, report_on
from lmbench.sweep.engine import Engine, OnInterrupt
from lmbench.sweep.environments import HERE
from lmbench.sweep.execute import Execution, Pace
from lmbench.sweep.folder import FINAL
from lmbench.sweep.local import LocalExecutor
from lmbench.sweep.plan import GridCell, Plan
from lmbench.sweep.progress import SweepProgress, announcement
from lmbench.sweep.rows import Rows
from lmbench.sweep.tasks import TaskExecution
from lmbench.wandb.publish import WandbProblem, common_destination, upload_command, write_new
from lmbench.wandb.upload import upload_results


@dataclass
class Sweep:
    """A plan and everything that it is measured with.

    Attributes:
        path: the sweep's folder.
        title: begins the lines on its progress; `sweep` or `compare` by default.
        names: the cells' names in these lines, by the cells' ids.
        pace: limits of measuring here.
        places: where the settings stand in the sweep's file.
        is_checked: whether the command line parses cells first; without it, a value that it refuses fails its run.
        engine: measures the plan by tasks on other machines; None measures on this machine.
        on_interrupt: what an interruption does to these tasks.
    """

    plan: Plan
    path: Path
    title: str = ""
    names: Mapping[str, str] | None = None
    pace: Pace = field(default_factory=Pace)
    places: Mapping[str, str] = field(default_factory=dict)
    is_checked: bool = True
    engine: Engine | None = None
    on_interrupt: OnInterrupt = "ask"

    def __post_init__(self) -> None:
        self.progress = SweepProgress(self.plan, self.title, self.names)
        self._rows = Rows(self.plan, self.path, self.progress)

    def carry_out(self, is_dry: bool = False) -> ExitCode:
        """Measure the plan, completely or as far as its pace says, and publish the results.

        With `is_dry` the plan is only checked and printed.

        Raises:
            UsageError: the folder belongs to another sweep, a cell has unknown options, or the engine refuses.
            Failure: the disk is full, or a process cannot be started. A restart keeps all finished runs.
        """
        with closing(self._rows), ExitStack() as servers:
            executor = self.pace.executor or servers.enter_context(closing(LocalExecutor(self._rows.mark)))
            tasks = None if self.engine is None else TaskExecution(self._rows, self.engine, self.on_interrupt)
            description = announcement(self.plan) if tasks is None else tasks.describe()
            # A misspelt option would look like another sweep to the folder.
            self._check_file()
            # Rounds measured elsewhere are locked by their tasks.
            self._rows.open(self.plan.chosen if tasks is None else (), is_dry=True)
            self._rows.close()
            executor.is_hasty = bool(self.plan.file.sides)
            # Made before the check, which uses the servers of its first round.
            execution = Execution(self._rows, executor, self._predict_largest, self.pace)
            if not is_dry:
                self.progress.announce(f"{announcement(self.plan)}; the runs are in {self.path}")
            if self.is_checked:
                execution.check(self.places)
            if is_dry:
                self._show(description)
                return ExitCode.OK
            try:
                if tasks is None:
                    self._rows.open(self.plan.chosen)
                    execution.run()
                else:
                    servers.close()
                    tasks.run(self.pace.is_enough)
            except OSError as error:
                raise Failure(f"the sweep cannot go on: {error}; mend that, and go on with the same folder") from error
            finally:
                self.progress.line.clear()
            servers.close()
            if self.progress.ends and not self.plan.is_part:
                self._publish()
        return self._rows.exit_code

    def conclude(self) -> None:
        """Print how many runs there are, and the commands for them."""
        path, total = str(self.path.absolute()), self.progress.total
        if ends := self.progress.ends:
            outcomes = Counter(outcome for outcome, _ in ends.elements())
            counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
            print(shown(f"{path}: {self.progress.count} runs: {counts}"))
            if total is not None and sum(outcomes[outcome] for outcome in FINAL) < total:
                print(shown(f"go on:  {shlex.join(['lmbench', 'sweep', path])}"))
            print(shown(f"report: {shlex.join(['lmbench', 'report', path])}"))

    def _check_file(self) -> None:
        """Raises UsageError for a view that is wrong, and for misspelt options of cells."""
        problems = list[str]()
        try:
            if self.plan.file.view is not None:
                make_catalogue().view(self.plan.file.view, self.plan.file.matrix, self.places)
        except UsageError as error:
            problems.append(str(error))
        words = [f"--config={config}" for config in self.plan.configs]
        # Options of other environments are not checked: another revision of lmbench may have others.
        words += [f"--{name}=" for cell in self.plan.cells if cell.environment is HERE for name in cell.options]
        check_options(words, self.places, problems)

    def _show(self, description: str) -> None:
        """Print every cell with its command line, then how much there is to measure."""
        for cell in self.plan.cells:
            line = shlex.join(masked_words(["lmbench", *cell.words()]))
            print(f"{shown(cell.id)}\n    {shown(line)}")
        print(description)

    def _predict_largest(self, cell: GridCell, option: str) -> int | None:
        """Predict the largest value of an option with which a cell fits on the GPU here. None without a prediction."""
        gpu = gpu_for(None)
        if gpu is None or cell.environment is not HERE or cell.command != "fit":
            return None
        self.progress.keep(f"predicting the largest {option} of {cell.id}")
        try:
            words = self._rows.words(cell)[1:]
            (target,) = ask_forecast(words, Request([gpu], finds_largest=True)).on_gpus
        except (UsageError, ProcessFailed):
            # If the cell cannot run, its run says why.
            return None
        largest_values = {
            "data.batch_size": target.largest_batch_size,
            "data.context_length": target.largest_context_length,
        }
        return largest_values.get(option)

    def _publish(self) -> None:
        """Write a row for each cell to cells.csv, and every run to W&B. A failure here does not fail the sweep.

        The runs measured now alone decide whether runs are uploaded, and where to: the folder may hold older runs that
        were filed otherwise.
        """
        filings = self._rows.filings
        later = upload_command(self._rows.path, filings)
        modes = {filing.mode for filing in filings}
        try:
            cells = report_on(read_sections([self._rows.path], make_catalogue()))
            write_whole(self._rows.path / CELLS_FILE, render(cells, "csv"))
            if modes == {"offline"}:
                write_new(find_runs([self._rows.runs]))
                print(shown(f"W&B: offline, beside the results; upload: {later}"))
        except (WandbProblem, OSError) as problem:
            self.progress.keep(f"W&B did not get all of this sweep: {problem}; later: {later}")
        if "online" in modes:
            upload_results([self._rows.path], common_destination(filings))
