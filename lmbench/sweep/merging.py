"""Merging the folders of one sweep that was measured on several machines."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from lmbench.errors import UsageError
from lmbench.files import Unreadable, read_file
from lmbench.programs import run_program
from lmbench.records.load import MAX_RUN_BYTES, is_run_folder
from lmbench.records.store import RUN_FILE, RUNS_FOLDER
from lmbench.sweep.plan import Plan


def merge_runs(plan: Plan, path: Path, other: Path, is_dry: bool) -> None:
    """Copy the runs of another folder of the same sweep into this one. With `is_dry` only check that this works.

    All runs are copied into a hidden folder first, so that an interruption leaves none in part. A run that is here
    already with the same run.json is left out.

    Raises:
        UsageError: the other folder has no runs, or one of another sweep, or one with a pipe or device in it; both have
            a run of the same cell and repeat; or the runs cannot be copied.
    """
    # The other folder has rounds that are not measured here, as `--rounds` says.
    names = {job.name for repeat in range(plan.file.repeats) for job in plan.round(repeat)}
    runs = [run for run in sorted((other / RUNS_FOLDER).glob("*")) if is_run_folder(run)]
    if not runs:
        raise UsageError(f"--merge {other}: there are no runs in {other / RUNS_FOLDER}")
    new = []
    for run in runs:
        if run.name not in names:
            raise UsageError(f"--merge {other}: {run.name} is no run of this sweep; merge folders of one study")
        for file in run.rglob("*"):
            if not (file.is_symlink() or file.is_file() or file.is_dir()):
                raise UsageError(f"--merge {other}: {run.name}/{file.name} is no file, link or folder; remove it")
        here = path / RUNS_FOLDER / run.name
        if not os.path.lexists(here):
            new.append(run)
        elif _run_json(here) != _run_json(run) or _run_json(run) is None:
            raise UsageError(f"--merge {other}: {run.name} is here already; one would hide the other: remove one")
    if is_dry or not new:
        return
    copies = path / RUNS_FOLDER / ".merge"
    try:
        shutil.rmtree(copies, ignore_errors=True)
        copies.mkdir(parents=True)
        # cp keeps the holes of sparse files, which Python's copytree would fill.
        words = ["cp", "--recursive", "--no-dereference", "--preserve=timestamps", "--", *map(str, new), str(copies)]
        process = run_program(words, None)
        if process.returncode:
            raise OSError(process.stderr)
        for run in new:
            (copies / run.name).rename(path / RUNS_FOLDER / run.name)
    except OSError as error:
        raise UsageError(f"--merge {other}: nothing was merged: {error}") from error
    finally:
        shutil.rmtree(copies, ignore_errors=True)


def _run_json(run: Path) -> bytes | None:
    """The content of a run's run.json, None where it cannot be read."""
    with suppress(Unreadable):
        return read_file(run / RUN_FILE, MAX_RUN_BYTES)
    return None
