"""`lmbench sweep STUDY`: measure a grid of configurations, each cell in a process of its own."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lmbench.commands import upload
from lmbench.commands.parser import CommandParser, command
from lmbench.commands.report import make_catalogue
from lmbench.configs import shipped_studies
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.masking import masked_words
from lmbench.records.load import find_runs
from lmbench.records.run import WandbFiling
from lmbench.records.store import SWEEP_FILE
from lmbench.sweep.execute import Execution, SweepHalted, check_cells
from lmbench.sweep.file import Options, SweepFile, read_sweep_file
from lmbench.sweep.folder import SweepFolder, read_sweep_folder
from lmbench.sweep.plan import GridCell, Plan, find_sweep, make_plan
from lmbench.sweep.progress import Estimate, Progress, cost, extent
from lmbench.sweep.servers import Servers
from lmbench.text import shown
from lmbench.wandb.publish import WandbProblem, upload_options, write_new

DESCRIPTION = """\
Measures every cell of a grid, each repeat in a fresh process of `lmbench fit` (or
`validate`, for inference). SWEEP is a YAML file, a shipped study by name, or the
folder of a sweep to go on with. Finished runs are not done again; a run that fails
is a row with its outcome, and the others go on. Further options (--data.batch_size 2)
are for every cell.

A file has base (options of every cell; config names a configuration), matrix, include,
exclude, modes, passes (timing, sync, kernels, memory: other instruments, once a cell),
environments (python, revision and tree, variables), repeats, timeout_s, view, and
largest: an option (data.batch_size) of which each cell finds the largest value that
fits, by trial from what `lmbench memory` predicts."""

_TINY = "tiny_"


@command
def run(args: list[str]) -> int:
    """Run or list a sweep; returns the exit code."""
    try:
        options, given = _parser(lists_studies=bool({"-h", "--help"} & set(args))).parse_known_args(args[1:])
        return _sweep(options, read_options(given))
    except SweepHalted as error:
        tell(f"sweep: {error}")
        return ExitCode.INTERNAL


def _parser(lists_studies: bool = False) -> CommandParser:
    parser = CommandParser("sweep", DESCRIPTION)
    if lists_studies:
        parser.epilog = _studies()
    # Optional to argparse only, which otherwise prints its usage where it is missing.
    parser.add_argument("sweep", nargs="?", metavar="SWEEP", help="a file, a study's name, or the folder of a sweep")
    parser.add_argument(
        "--results_dir", default="results", metavar="DIR", help="where the sweep's folder goes (results)"
    )
    parser.add_argument("--name", help="name of the sweep's folder (default: the file's)")
    parser.add_argument("--dry_run", action="store_true", help="list the cells and what each would run")
    parser.add_argument("--repeats", type=int, metavar="N", help="processes of each cell, instead of the file's")
    parser.add_argument("--timeout_s", type=float, metavar="S", help="seconds a run may take, instead of the file's")
    return parser


def _studies() -> str:
    """The shipped studies, a line each: their files' first words."""
    lines = []
    width = max(map(len, shipped_studies()))
    for name, path in shipped_studies().items():
        comment = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        told = re.split(r"[.:;](?=\s|$)", " ".join(line.lstrip("# ") for line in comment))[0]
        if not name.startswith(_TINY):
            lines.append(f"  {name:<{width}} {told}")
    return "\n".join(["studies (tiny_NAME is the same for a CPU, in a minute or two):", *lines])


def read_options(words: list[str]) -> Options:
    """Options for every cell: `--name value` or `--name=value`."""
    options: Options = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise UsageError(f"{word!r} was not understood; options are --name value, after the sweep")
        if not has_value:
            if not rest:
                raise UsageError(f"{word} has no value; options for every cell are --name value")
            value = rest.pop(0)
        options[name] = value
    return options


def _sweep(given: argparse.Namespace, options: Options) -> int:
    name, results_dir, file = _find(given)
    file = file.changed(options, given.repeats, given.timeout_s)
    if file.sides:
        raise UsageError(f"{given.sweep!r} has sides to compare; `lmbench compare --run FOLDER` goes on with it")
    if file.view is not None:
        make_catalogue().view(file.view, file.matrix)
    plan = make_plan(name, file, makes_checkouts=not given.dry_run)
    if given.dry_run:
        _list(plan, Estimate(plan))
        return ExitCode.OK
    return carry_out(plan, results_dir / name, Progress(plan, Estimate(plan)), _conclude)


def carry_out(
    plan: Plan,
    path: Path,
    progress: Progress,
    conclude: Callable[[Path, Progress], None],
    is_enough: Callable[[int], bool] = lambda rounds: False,
) -> ExitCode:
    """Bring a plan to its end in its folder, or as many rounds of it as are enough, and publish what came of it.

    Raises:
        UsageError: the folder is another's, or a cell's options are not understood.
        SweepHalted: the disk is full, or a process cannot be started.
    """
    folder = SweepFolder(path)
    progress.begin()
    servers = Servers(progress.said, mark=folder.mark)
    try:
        execution = Execution(plan, folder, servers, progress, partial(_predicted, folder, progress))
        known = folder.known_cells()
        if new := [cell for cell in plan.cells if cell.id not in known]:
            check_cells(plan, new, servers, progress.said)
        folder.open(plan)
        try:
            execution.run(is_enough)
        finally:
            progress.close()
            conclude(folder.path, progress)
        servers.close()
        _publish(folder, progress, execution.filings)
    finally:
        servers.close()
        folder.close()
    return execution.exit_code


def _find(given: argparse.Namespace) -> tuple[str, Path, SweepFile]:
    """Name, results folder and file of the sweep that was named."""
    if given.sweep is None:
        raise UsageError("sweep needs a SWEEP: a file, a study's name, or the folder of a sweep to go on with")
    path = Path(given.sweep)
    if os.path.lexists(path / SWEEP_FILE):
        if given.name is not None:
            raise UsageError("--name names a new sweep; a sweep's folder has its name")
        name, file = read_sweep_folder(path)
        return name, path.absolute().parent, file
    path = find_sweep(given.sweep)
    name = given.name or path.stem
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or name.startswith("."):
        raise UsageError(f"--name {name!r}: only letters, digits and '_.-' are allowed, and no '.' first")
    return name, Path(given.results_dir), read_sweep_file(path)


def _predicted(folder: SweepFolder, progress: Progress, cell: GridCell, option: str) -> int | None:
    """The largest value of an option that a cell has room for on the GPU here, by prediction; None if nobody knows."""
    from lmbench.memory.asking import PredictionFailed, Request, ask_forecast, gpu_for

    gpu = gpu_for(None)
    if gpu is None or cell.environment is not None or cell.command != "fit":
        return None
    config = folder.config_path(cell)
    given = [] if config is None else [f"--config={config}"]
    progress.noted(f"predicting the largest {option} of {cell.id}")
    try:
        made = ask_forecast([*given, *cell.words()[1:]], Request(gpu, finds_largest=True))
    except (UsageError, PredictionFailed) as error:
        progress.said(f"{cell.id} is tried without a prediction: {error}")
        return None
    known = {"data.batch_size": made.largest_batch_size, "data.context_length": made.largest_context_length}
    found = known.get(option)
    return None if found is None else found.value


def _list(plan: Plan, estimate: Estimate) -> None:
    for cell in plan.cells:
        command, *options = cell.words()
        words = ["lmbench", command, *([f"--config={cell.config}"] if cell.config is not None else []), *options]
        where = f"   (in environment {cell.environment})" if cell.environment is not None else ""
        print(f"{shown(cell.id)}\n    {shown(shlex.join(masked_words(words)) + where)}")
    if (spec := plan.file.largest) is not None:
        print(f"each of {len(plan.cells)} with the largest {spec.option} that fits, by trial")
        return
    print(f"{extent(plan)}\n{cost(plan, estimate)}")


def _conclude(path: Path, progress: Progress) -> None:
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(progress.outcomes.items()))
    count = progress.outcomes.total()
    of_all = "" if progress.is_open else f" of {progress.total}"
    print(shown(f"{path}: {count}{of_all} runs{f': {outcomes}' if outcomes else ''}"))
    if not progress.is_open and count < progress.total:
        print(shown(f"go on:  {shlex.join(['lmbench', 'sweep', str(path)])}"))
    if progress.outcomes:
        print(shown(f"report: {shlex.join(['lmbench', 'report', str(path)])}"))


def _publish(folder: SweepFolder, progress: Progress, filings: list[WandbFiling]) -> None:
    """Leave a row for each cell in cells.csv, and every run for W&B. What hinders that is no failure of the sweep.

    `filings` are those of the runs that were measured now. What was in the folder before decides neither whether
    something is uploaded nor where to.
    """
    path = folder.path
    words = ["upload", str(path), *upload_options(filings)]
    later = shlex.join(["lmbench", *words])
    try:
        folder.write_cells(_table(path))
        mode = write_new(find_runs([folder.runs]), progress.noted)
    except (WandbProblem, OSError) as problem:
        progress.said(f"W&B did not get all of this sweep: {problem}; later: {later}")
        return
    finally:
        progress.close()
    if any(filing.mode == "online" for filing in filings):
        upload.run(words)
    elif mode == "online":
        print(shown(f"W&B: what was measured before is not uploaded unasked: {later}"))
    elif mode == "offline":
        print(shown(f"W&B: offline, beside the results; upload: {later}"))


def _table(path: Path) -> str:
    """The sweep's cells as CSV."""
    # Here, since statistics and tables take their time to import, and help and dry runs need none.
    from lmbench.report.delimited import to_csv
    from lmbench.report.gather import gather
    from lmbench.report.sections import build_report

    return to_csv(build_report(gather([path]), make_catalogue()))
