"""Results by name: `last`, `last~1`, and names that a user gave, such as `baseline`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lmbench.errors import UsageError
from lmbench.files import is_file
from lmbench.records.load import find_runs, load_known
from lmbench.records.store import RESULTS, RUNS_FOLDER, SWEEP_FILE

_LAST = re.compile(r"(?P<folder>[^@]*/)?last(?:~(?P<back>\d+))?(?P<rest>[/@].*)?")
_NAME = re.compile(r"(?P<name>[A-Za-z0-9_-][A-Za-z0-9_.-]*)(?P<rest>[/@].*)?")


class Result(NamedTuple):
    """A run, or a sweep with its runs. `began` sorts results by the start of their newest run."""

    path: Path
    runs: list[Path]
    began: tuple[str, int]


def sweep_of(run: Path) -> Path | None:
    """The folder of the sweep that a run's folder lies in, None of a single run."""
    above = run.parent.parent
    return above if run.parent.name == RUNS_FOLDER and is_file(above / SWEEP_FILE) else None


def results_in(paths: Iterable[str | Path]) -> list[Result]:
    """Every result at or below the paths, the newest first; runs of a sweep that was itself named stand alone.

    Raises:
        UsageError: a path does not exist or holds no result.
    """
    named = {Path(path).resolve() for path in paths}
    homes: dict[Path, list[Path]] = {}
    for run in find_runs(named):
        home = sweep_of(run)
        homes.setdefault(home if home and home not in named else run, []).append(run)
    results = []
    for path, runs in homes.items():
        # Runs of the same second are told apart by when their files were written.
        began = max((load_known(run).record.started_at or "", os.lstat(run).st_mtime_ns) for run in runs)
        results.append(Result(path, runs, began))
    return sorted(results, key=lambda result: result.began, reverse=True)


def given_names() -> dict[str, Path]:
    """The results that were given a name, by it: links beside the results."""
    if not RESULTS.is_dir():
        return {}
    return {path.name: path.readlink() for path in sorted(RESULTS.iterdir()) if path.is_symlink()}


def find_result(given: str) -> str:
    """The path that a result is given by: itself, or what `last`, `last~1` or a name of the user's stands for.

    `last` is the newest run or sweep in `results`, `FOLDER/last` the newest in another folder. A part of a sweep may
    follow, as in `last/CELL` and `baseline@precision=bf16-mixed`. What exists under the path itself comes first.

    Raises:
        UsageError: there are fewer results, or the result of that name is gone.
    """
    if os.path.lexists(given):
        return given
    if match := _LAST.fullmatch(given):
        folder, back = Path(match["folder"] or RESULTS), int(match["back"] or 0)
        results = results_in([folder]) if folder.is_dir() else []
        if back >= len(results):
            raise UsageError(f"{given!r}: {str(folder)!r} holds {len(results)} results; `lmbench list` shows them")
        return shown_path(results[back].path) + (match["rest"] or "")
    match, names = _NAME.fullmatch(given), given_names()
    if match is None or match["name"] not in names:
        return given
    path = RESULTS / names[match["name"]]
    if not path.is_dir():
        raise UsageError(f"{match['name']!r} was the name of {path}, which is gone; give the name to another result")
    return os.path.normpath(path) + (match["rest"] or "")


def name_result(name: str, path: Path) -> None:
    """Give a result a name, which another result may have had: a link beside the results.

    Raises:
        UsageError: it is no name, or something else has it.
    """
    link = RESULTS / name
    match = _NAME.fullmatch(name)
    if match is None or match["rest"] or _LAST.fullmatch(name):
        raise UsageError(f"--name {name!r}: only letters, digits and '_.-' are allowed, no '.' first, and not 'last'")
    if os.path.lexists(link) and not link.is_symlink():
        raise UsageError(f"--name {name!r}: {link} is a result itself; give another name")
    try:
        RESULTS.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(path, RESULTS))
    except OSError as error:
        raise UsageError(f"{link} cannot be written: {error.strerror}; write into {str(RESULTS)!r} first") from error


def shown_path(path: Path) -> str:
    """A result's path, from the working directory where it lies in there."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
