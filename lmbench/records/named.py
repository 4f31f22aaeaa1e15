"""Results by name: `last`, `last~1`, and the user's own names, such as `baseline`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lmbench.configs import shipped_configs, shipped_studies
from lmbench.errors import UsageError
from lmbench.files import is_file
from lmbench.records.load import find_runs, load_known
from lmbench.records.run import RunRecord
from lmbench.records.store import RESULTS, RUNS_FOLDER, SWEEP_FILE

#: A folder's name may have an `@` that begins no `@AXIS=VALUE`.
_LAST = re.compile(r"(?P<folder>(?:[^@]|@(?![^/]*=))*/)?last(?:~(?P<back>\d+))?(?P<rest>[/@].*)?")
#: A file's name has at most 255 bytes.
_NAME = re.compile(r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]{0,254})(?P<rest>[/@].*)?")


class Result(NamedTuple):
    """A single run, or a sweep with its runs.

    `began` is the start of the newest run, by which results are sorted: UTC time and the folder's time in ns.
    """

    path: Path
    runs: list[Path]
    began: tuple[str, int]


def sweep_of(run: Path) -> Path | None:
    """The folder of the sweep that a run's folder lies in; None for a single run."""
    sweep = run.parent.parent
    return sweep if run.parent.name == RUNS_FOLDER and is_file(sweep / SWEEP_FILE) else None


def results_in(paths: Iterable[str | Path]) -> list[Result]:
    """Every result at or below the paths, the newest first.

    A sweep is one result, unless its folder is one of the paths: then each of its runs is a result.

    Raises:
        UsageError: a path does not exist or holds no result.
    """
    roots = {Path(path).resolve() for path in paths}
    runs_by_result: dict[Path, list[Path]] = {}
    for run in find_runs(roots):
        sweep = sweep_of(run)
        runs_by_result.setdefault(sweep if sweep and sweep not in roots else run, []).append(run)
    results = []
    for path, runs in runs_by_result.items():
        # Runs that started in the same second are ordered by the time at which their folders were last written.
        began = max((load_known(run).record.started_at or "", os.lstat(run).st_mtime_ns) for run in runs)
        results.append(Result(path, runs, began))
    return sorted(results, key=lambda result: result.began, reverse=True)


def given_names() -> dict[str, Path]:
    """The results with a name of the user's, by name: the links in the folder of results."""
    if not RESULTS.is_dir():
        return {}
    links = (path for path in sorted(RESULTS.iterdir()) if path.is_symlink() and _NAME.fullmatch(path.name))
    # Path.resolve raises where a link leads to itself.
    return {path.name: Path(os.path.realpath(path)) for path in links}


def find_result(text: str) -> str:
    """The path of a result that is named by `last`, `last~1`, a name of the user's or its folder's name in `results`;
    any other text unchanged.

    `last` is the newest run or sweep in `results`, `FOLDER/last` the newest in another folder. A part of a sweep may
    follow, as in `last/CELL` and `baseline@precision=bf16-mixed`. A text that is an existing path stays as it is, and
    so does the name of a shipped configuration or study.

    Raises:
        UsageError: there are not so many results, or the result with that name is gone.
    """
    if os.path.lexists(text):
        return text
    if match := _LAST.fullmatch(text):
        # Python refuses to convert a number of thousands of digits.
        folder, back = Path(match["folder"] or RESULTS), float(match["back"] or 0)
        results = results_in([folder]) if folder.is_dir() else []
        if back >= len(results):
            count = f"number of results in {str(folder)!r}: {len(results)}"
            raise UsageError(f"{text[:80]!r}: {count}; `lmbench list` shows them")
        return shown_path(results[int(back)].path) + (match["rest"] or "")
    match, names = _NAME.fullmatch(text), given_names()
    if match is None:
        return text
    if match["name"] not in names:
        # The name of a run or sweep may be that of a shipped file, which some commands take too.
        is_shipped = match["name"] in shipped_configs() or match["name"] in shipped_studies()
        return str(RESULTS / text) if (RESULTS / match["name"]).is_dir() and not is_shipped else text
    target = names[match["name"]]
    path = shown_path(target)
    if not target.is_dir():
        raise UsageError(f"{match['name']!r} was the name of {path}, which is gone; give the name to another result")
    return path + (match["rest"] or "")


def name_result(name: str, path: Path) -> Path | None:
    """Give a result a name by a link in the folder of results. Returns the result that had the name, and loses it.

    Raises:
        UsageError: the name is not allowed, a file or folder has it, or the link cannot be written.
    """
    link = RESULTS / name
    match = _NAME.fullmatch(name)
    if match is None or match["rest"] or _LAST.fullmatch(name):
        raise UsageError(
            f"--name {name!r}: only letters, digits and '_.-' of ASCII, at most 255, no '.' or '-' first, not 'last'"
        )
    if os.path.lexists(link) and not link.is_symlink():
        raise UsageError(f"--name {name!r}: {link} is a result itself; give another name")
    earlier = given_names().get(name)
    try:
        RESULTS.mkdir(exist_ok=True)
        # An interruption in between leaves the name as it was.
        temporary = link.with_name(f".{name}.{os.getpid()}")
        # The folder of results may be a link itself, and the kernel reads `..` from where that leads.
        temporary.symlink_to(os.path.relpath(path.resolve(), RESULTS.resolve()))
        temporary.replace(link)
    except OSError as error:
        raise UsageError(
            f"{link} cannot be written: {error.strerror}; names need a {RESULTS} folder that you may write to"
        ) from error
    return earlier


def repeat_command(run: RunRecord, folder: Path) -> str:
    """The command that repeats a run, as a person here types it and a page that is sent shows it.

    It names the configuration where the run's folder lies now. Paths begin at the working directory.
    """
    command, config = run.replay_command or "", folder / "config.yaml"
    recorded = re.search(rf"(?<=--config )('?)[^']*/{re.escape(run.run_id or '')}/config\.yaml\1", command)
    if recorded and is_file(config):
        command = command.replace(recorded[0], shlex.quote(shown_path(config)))
    return re.sub(rf"(?<![^\s'\"=]){re.escape(str(Path.cwd()))}/", "", command)


def shown_path(path: Path) -> str:
    """A result's path, relative to the working directory if it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
