"""`lmbench upload RESULTS...`: bring results to W&B that are not there yet."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lmbench.commands.parser import CommandParser, command
from lmbench.errors import ExitCode, UsageError
from lmbench.records.load import find_runs, is_run_folder, load_run
from lmbench.records.store import CELLS_FILE, RUNS_FOLDER
from lmbench.records.vocabulary import DAMAGED, RUNNING
from lmbench.wandb.problem import BoardProblem
from lmbench.wandb.upload import DEFAULT_TIMEOUT_S, upload

DESCRIPTION = """\
Uploads every result at or below the given folders to W&B, each exactly once: steps,
summary, configuration, environment, guards, and of a sweep the table of its cells.
Needs wandb, and a key from WANDB_API_KEY or `wandb login`; WANDB_BASE_URL names a
server of your own."""


@command
def run(args: list[str]) -> int:
    """Upload, a line a result; returns the exit code: 2 if the key is at fault, 1 if something else is."""
    options = _parse(args[1:])
    folders = find_runs(options.results)
    folders += _sweeps_of(folders, options.results)
    return _upload_all(folders, options.timeout_s)


def _parse(words: list[str]) -> argparse.Namespace:
    parser = CommandParser("upload", DESCRIPTION)
    parser.add_argument("results", nargs="*", metavar="RESULTS", help="result folders, or folders of them")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help=f"seconds for each result (default {DEFAULT_TIMEOUT_S:g})",
    )
    options = parser.parse_args(words)
    if not options.results:
        raise UsageError("nothing to upload; name result folders, such as `lmbench upload results`")
    if not options.timeout_s > 0:
        raise UsageError(f"--timeout-s is {options.timeout_s:g}; it must be above 0")
    return options


def _sweeps_of(folders: list[Path], given: list[str]) -> list[Path]:
    """The sweeps whose folders lie at or below what was given, where they were brought to their end."""
    homes = {folder.parent.parent for folder in folders if folder.parent.name == RUNS_FOLDER}
    roots = [Path(each).resolve() for each in given]
    return sorted(h for h in homes if (h / CELLS_FILE).is_file() and any(h.is_relative_to(root) for root in roots))


def _upload_all(folders: list[Path], timeout_s: float) -> int:
    code = ExitCode.OK
    for place, folder in enumerate(folders):
        try:
            _upload_one(folder, timeout_s)
        except BoardProblem as problem:
            print(f"lmbench: not uploaded: {folder}: {problem}", file=sys.stderr)
            code = ExitCode.USAGE if problem.is_usage else max(code, ExitCode.INTERNAL)
            remaining = len(folders) - place - 1
            if problem.is_general and remaining:
                print(
                    f"lmbench: {remaining} more not tried, since nothing about them would be different", file=sys.stderr
                )
                break
        except UsageError as error:
            print(f"lmbench: not uploaded: {error}", file=sys.stderr)
            code = ExitCode.USAGE
    return code


def _upload_one(folder: Path, timeout_s: float) -> None:
    if is_run_folder(folder):
        outcome = load_run(folder).outcome
        if outcome == RUNNING:
            print(f"still running     {folder}")
            return
        if outcome == DAMAGED:
            raise BoardProblem("its run.json cannot be read")
    done = upload(folder, timeout_s)
    what = "uploaded        " if done.was_new else "already uploaded"
    print(f"{what}  {folder}{f' -> {done.url}' if done.url else ''}", flush=True)
