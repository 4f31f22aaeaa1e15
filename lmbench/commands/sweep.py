"""`lmbench sweep STUDY`: measure a grid of configurations, each cell in a process of its own."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from textwrap import shorten

from lmbench.commands.report import make_catalogue
from lmbench.commands.signatures import check_options
from lmbench.configs import lines_of, shipped_studies
from lmbench.errors import ExitCode, UsageError
from lmbench.masking import masked_words, shown
from lmbench.records.load import find_runs
from lmbench.records.run import WandbFiling
from lmbench.records.store import CELLS_FILE, SWEEP_FILE, check_name, write_whole
from lmbench.sweep.environments import HERE
from lmbench.sweep.execute import Execution, Pace, check_cells
from lmbench.sweep.file import Options, read_sweep_file
from lmbench.sweep.folder import SweepFolder, read_sweep_folder
from lmbench.sweep.local import LocalExecutor
from lmbench.sweep.plan import GridCell, Plan, find_sweep, make_plan
from lmbench.sweep.progress import Progress, announcement
from lmbench.sweep.rows import Rows
from lmbench.sweep.tasks import Engine, OnInterrupt, TaskExecution, make_engine
from lmbench.sweep.tasks import merge as merge_runs
from lmbench.wandb.publish import WandbProblem, upload_options, write_new


def sweep(
    study: str,
    *,
    results_dir: Path = Path("results"),
    name: str | None = None,
    rounds: str | None = None,
    merge: Path | None = None,
    on: str = "local",
    on_interrupt: OnInterrupt = "ask",
    dry_run: bool = False,
    trust: bool = False,
    repeats: int | None = None,
    timeout_s: float | None = None,
    settings: list[str] | None = None,
) -> int:
    """Measures every cell of a grid, each repeat in a fresh process.

    STUDY is a YAML file, a shipped study by name, or the folder of a sweep to go on with. Finished runs are not done
    again; a run that fails is a row with its outcome, and the others go on. Further options (--data.batch_size 2) are
    for every cell.

    A file has base (options of every cell; config names a configuration), matrix, include, exclude, modes, passes
    (timing, sync, kernels, memory), environments (python, revision, variables), repeats, timeout_s, view, and
    largest: an option (data.batch_size) of which each cell finds the largest value that fits, by trials that begin at
    the prediction of `lmbench memory`.

    With --on slurm each round of repeats is a task of a job array, in a folder that the nodes share (--slurm.partition,
    .time in minutes, .gpus_per_node, .constraint, .account, .setup, .array_parallelism, .additional
    mem=64G,exclusive); --on my_module.MyEngine is an engine of yours (lmbench.sweep.tasks.Engine). On other machines
    --rounds 2,5 measures some of the rounds, and --merge brings the folders together.

    STUDIES

    Args:
        study: a file, a study's name, or the folder of a sweep
        results_dir: where the sweep's folder goes
        name: name of the sweep's folder, the file's by default
        rounds: only these repeats, counted from 0, such as 2,5
        merge: first add the runs of this other folder of the sweep
        on: local, slurm, or an engine's class
        on_interrupt: ask, leave or cancel its tasks
        dry_run: check as a start would, and list cells and runs
        trust: go on with a folder that you did not begin here
        repeats: processes of each cell, instead of the file's
        timeout_s: seconds a run may take, instead of the file's
        settings: options of `lmbench fit` for every cell
    """
    if os.path.lexists(Path(study) / SWEEP_FILE):
        if name is not None:
            raise UsageError("--name names a new sweep; a sweep's folder has its name")
        places = dict[str, str]()
        path, file = Path(study).absolute(), read_sweep_folder(Path(study), trust)
    else:
        source = find_sweep(study)
        path, file = results_dir / (name or source.stem), read_sweep_file(source)
        places = lines_of(source.read_text("utf-8"), str(source))
        check_name("--name", path.name if name is None else name)
    options = read_options(settings or [])
    engine = make_engine(on, options)
    file = file.changed(options, repeats, timeout_s)
    if file.sides and rounds is None:
        raise UsageError(f"{study!r} has sides to compare; `lmbench compare --run FOLDER` goes on with it")
    plan = make_plan(path.name, file, rounds)
    if merge is not None:
        merge_runs(plan, path, merge, dry_run)
    progress = Progress(plan)
    with concluding(path, progress):
        return carry_out(plan, path, progress, is_dry=dry_run, places=places, engine=engine, on_interrupt=on_interrupt)


def _studies() -> str:
    """The shipped studies, one line each, with the first clause of the file's comment."""
    lines = ["studies (tiny_NAME is the same for a CPU, in a minute or two):"]
    for name, path in shipped_studies().items():
        comment = path.read_text("utf-8").replace("\n# ", " ").lstrip("# ")
        question = re.split(r"[.:;](?=\s|$)", comment)[0]
        if not name.startswith("tiny_"):
            lines.append(f"      {name:<18} {shorten(question, 56, placeholder=' ...')}")
    return "\n".join(lines)


sweep.__doc__ = str(sweep.__doc__).replace("STUDIES", _studies())


def read_options(words: list[str]) -> Options:
    """Options for every cell, from `--name value` or `--name=value`. Raises UsageError where a value is missing."""
    options: Options = {}
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.removeprefix("--").partition("=")
        options[name] = value if equals else next(remaining, None)
        if not word.startswith("--") or options[name] is None:
            raise UsageError(f"{word} has no value, or is no option; options for every cell are --name value")
    return options


def carry_out(
    plan: Plan,
    path: Path,
    progress: Progress,
    pace: Pace | None = None,
    is_dry: bool = False,
    places: Mapping[str, str] = {},
    engine: Engine | None = None,
    on_interrupt: OnInterrupt = "ask",
) -> ExitCode:
    """Measure a plan in its folder, completely or as far as its pace says, and publish the results.

    With `is_dry` the plan is only checked and printed. `places` says where the settings stand in the sweep's file. An
    `engine` measures the plan by tasks on other machines, which an interruption treats as `on_interrupt` says. Without
    it this machine measures.

    Raises:
        UsageError: the folder belongs to another sweep, a cell has unknown options, or the engine refuses.
        SweepHalted: the disk is full, or a process cannot be started.
    """
    words = [f"--config={config}" for config in plan.configs]
    # Options of other environments are not checked: another revision of lmbench may have others.
    words += [f"--{name}=" for cell in plan.cells if cell.environment is HERE for name in cell.options]
    pace = pace or Pace()
    with (
        closing(SweepFolder(path)) as folder,
        closing(pace.executor or LocalExecutor(folder.mark)) as executor,
    ):
        rows = Rows(plan, folder, progress)
        tasks = None if engine is None else TaskExecution(rows, engine, on_interrupt)
        description = announcement(plan) if tasks is None else tasks.describe()
        # Rounds measured elsewhere are locked by their tasks.
        folder.open(plan, plan.chosen if tasks is None else (), is_dry=True)
        folder.close()
        problems = list[str]()
        try:
            if plan.file.view is not None:
                make_catalogue().view(plan.file.view, plan.file.matrix, places)
        except UsageError as error:
            problems.append(str(error))
        check_options(words, places, problems)
        executor.is_hasty = bool(plan.file.sides)
        # Made before the check, which uses the servers of its first round.
        execution = Execution(rows, executor, partial(_predict_largest, folder, progress), pace)
        if not is_dry:
            progress.announce(announcement(plan))
        check_cells(plan, folder, executor, progress.announce, places)
        if is_dry:
            for cell in plan.cells:
                line = shlex.join(masked_words(["lmbench", *cell.words(cell.config)]))
                print(f"{shown(cell.id)}\n    {shown(line)}")
            print(description)
            return ExitCode.OK
        try:
            if tasks is None:
                folder.open(plan, plan.chosen)
                execution.run()
            else:
                executor.close()
                tasks.run(pace.is_enough)
        finally:
            progress.line.clear()
        executor.close()
        if progress.outcomes and not plan.is_part:
            _publish(folder, progress, rows.filings)
    return rows.exit_code


def _predict_largest(folder: SweepFolder, progress: Progress, cell: GridCell, option: str) -> int | None:
    """Predict the largest value of an option with which a cell fits on the GPU here. None without a prediction."""
    from lmbench.memory.forecast import Request, ask_forecast, gpu_for
    from lmbench.python_process import ProcessFailed

    gpu = gpu_for(None)
    if gpu is None or cell.environment is not HERE or cell.command != "fit":
        return None
    progress.keep(f"predicting the largest {option} of {cell.id}")
    try:
        forecast = ask_forecast(cell.words(folder.config_path(cell))[1:], Request(gpu, finds_largest=True))
    except (UsageError, ProcessFailed):
        # If the cell cannot run, its run says why.
        return None
    largest_values = {
        "data.batch_size": forecast.largest_batch_size,
        "data.context_length": forecast.largest_context_length,
    }
    largest = largest_values.get(option)
    return None if largest is None else largest.value


@contextmanager
def concluding(path: Path, progress: Progress) -> Iterator[None]:
    """When the block ends, also by an error, print how many runs there are and the commands for them."""
    try:
        yield
    finally:
        path, total = path.absolute(), progress.total
        if progress.outcomes:
            outcomes = ", ".join(f"{number} {outcome}" for outcome, number in sorted(progress.outcomes.items()))
            print(shown(f"{path}: {progress.count} runs: {outcomes}"))
            if total is not None and progress.outcomes.total() < total:
                print(shown(f"go on:  {shlex.join(['lmbench', 'sweep', str(path)])}"))
            print(shown(f"report: {shlex.join(['lmbench', 'report', str(path)])}"))


def _publish(folder: SweepFolder, progress: Progress, filings: list[WandbFiling]) -> None:
    """Write a row for each cell to cells.csv, and every run to W&B. A failure here does not fail the sweep.

    `filings` belong to the runs measured now. They alone decide whether runs are uploaded, and where to: the folder may
    hold older runs that were filed otherwise.
    """
    # Imported here, since statistics and tables are slow to import, and help and dry runs need none.
    from lmbench.commands.parser import run_typed
    from lmbench.commands.wandb import upload
    from lmbench.report.render import render
    from lmbench.report.results import report_on

    words = [str(folder.path), *upload_options(filings)]
    later = shlex.join(["lmbench", "upload", *words])
    modes = {filing.mode for filing in filings}
    try:
        write_whole(folder.path / CELLS_FILE, render(report_on([folder.path], make_catalogue()), "csv"))
        if modes == {"offline"}:
            write_new(find_runs([folder.runs]))
            print(shown(f"W&B: offline, beside the results; upload: {later}"))
    except (WandbProblem, OSError) as problem:
        progress.keep(f"W&B did not get all of this sweep: {problem}; later: {later}")
    if "online" in modes:
        run_typed("upload", upload, words)
