"""A sweep's folder: what it is, who began it, which of its runs are done, and who may write into it.

All paths in it are relative. Going on with a sweep runs what its files name. So the user's own state folder keeps a
digest of these files, which no folder that comes from elsewhere can put there; a folder that is moved keeps its digest.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from msgspec import Struct

from lmbench.configs import MAX_YAML_BYTES, may_run, parse_yaml
from lmbench.errors import UsageError, tell
from lmbench.files import Unreadable, is_file, is_folder, open_to_append, read_file
from lmbench.masking import leaves, masked, masked_whole
from lmbench.records.codec import DamagedRecord, decode, indented_json
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.store import MAX_SWEEP_BYTES, RUNS_FOLDER, SWEEP_FILE, write_whole
from lmbench.records.vocabulary import DAMAGED, RUNNING, SIDE
from lmbench.sweep.file import CONFIG, Options, SweepFile, sweep_from
from lmbench.sweep.plan import GridCell, Job, Plan, axes_of

#: Copies of configurations, the base's and those of sides, so that a change of the original meets no half of a sweep.
CONFIG_FILE = "base.yaml"
SIDE_CONFIG_FILE = "side-{}.yaml"
_FILES = (SWEEP_FILE, CONFIG_FILE, SIDE_CONFIG_FILE.format("A"), SIDE_CONFIG_FILE.format("B"))
#: The name of a run for every process that was started.
ATTEMPTS_FILE = "attempts.txt"
CHILD_LOG = "child.log"
#: The environment variable that every process of a sweep has: which folder it works for.
MARK = "LMBENCH_SWEEP"
_LOCK = ".lock"

#: Outcomes that are not tried again.
FINAL = ("ok", "oom", "timeout", "error", "skipped")


class FolderTaken(UsageError):
    """Another process measures a round of a sweep."""


class StoredSweep(Struct):
    """What is read again from sweep.json: the sweep's file, with the folder's copies of configurations."""

    file: dict[str, Any]


class SweepFolder:
    """`<results_dir>/<name>`; made by `open`, which also locks it."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.runs = self.path / RUNS_FOLDER
        #: The variables by which processes that a sweep of this folder started are known again.
        self.mark = {MARK: str(self.path.resolve())}
        self._open = ExitStack()

    def open(self, plan: Plan, rounds: Iterable[int], is_dry: bool = False) -> None:
        """Make the folder or go on with it, these rounds for this process alone; with `is_dry` only look whether that
        can be done.

        Raises:
            FolderTaken: another process has such a round.
            UsageError: it is another sweep's, or it cannot be written.
        """
        try:
            if is_dry and not os.path.lexists(self.path):
                parent = next(parent for parent in self.path.parents if parent.exists())
                if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
                    return
            self.runs.mkdir(parents=True, exist_ok=True)
            if not is_folder(self.runs):
                raise UsageError(f"{self.runs} is a link; remove it")
            lock = self._open.enter_context(open_to_append(self.path / _LOCK))
            self._attempts = self._open.enter_context(open_to_append(self.path / ATTEMPTS_FILE))
            # The kernel lets go of them when this process ends, however it does. A byte stands for a round, since other
            # processes may measure other rounds; ranges of bytes are what network file systems lock, too.
            for repeat in rounds:
                fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, repeat, 1, 0))
            # A run is named by its cell and its repeat, in between stands the value that a search tries.
            ids = {cell.id for cell in plan.cells}
            for path in filter(is_run_folder, sorted(self.runs.iterdir())):
                if not any(path.name[: dash.start()] in ids for dash in re.finditer("-", path.name)):
                    raise UsageError(
                        f"{self.path} holds {path.name}, which is no cell of this sweep as it is now: "
                        "its settings were changed; give another --name, or remove that run"
                    )
            if not is_dry:
                self._write_plan(plan)
        except BlockingIOError:
            problem = f"{self.path} is being written by another sweep; wait for it, or give --name"
            raise FolderTaken(problem) from None
        except OSError as error:
            problem = f"sweep folder {str(self.path)!r} cannot be written: {error.strerror}"
            raise UsageError(f"{problem}; choose another --results_dir") from error

    def close(self) -> None:
        """Let others have it; may be called again."""
        self._open.close()

    def _write_plan(self, plan: Plan) -> None:
        file = plan.file.as_mapping()
        texts = dict[str, str]()
        for options, name in _with_configs(file):
            text, content = (kept[str(options[CONFIG])] for kept in (plan.configs, plan.contents))
            stored = masked_whole(content)
            texts[name] = text if stored == content else yaml.safe_dump(stored, sort_keys=False)
            options[CONFIG] = name
        content = {
            "schema_version": SCHEMA_VERSION,
            "name": plan.name,
            "view": plan.file.view,
            "axes": axes_of([cell.axes for cell in plan.cells]),
            "cells": [{"id": cell.id, "axes": cell.axes, "options": masked_whole(cell.options)} for cell in plan.cells],
            "file": masked_whole(file),
        }
        texts[SWEEP_FILE] = indented_json(content)
        # What a sweep of other sides left takes no part.
        for name in set(_FILES) - texts.keys():
            (self.path / name).unlink(missing_ok=True)
        # First, so that a sweep that is killed here can be gone on with.
        _is_trusted({name: text.encode() for name, text in texts.items()}, adds=True)
        for name, text in texts.items():
            write_whole(self.path / name, text)

    def final(self, job: Job) -> RunRecord | None:
        """The record of the job's run, where it has one that is not to be tried again."""
        if not is_run_folder(self.runs / job.name):
            return None
        run = load_run(self.runs / job.name, with_steps=False)
        # Without its place in the sweep nobody saw it end; what it measured counts all the same.
        is_final = run.outcome == "ok" or (run.outcome in FINAL and run.record.sweep is not None)
        return run.record if is_final else None

    def clear(self, job: Job, say: Callable[[str], None]) -> None:
        """Remove what an earlier attempt left, and end its process where that outlived its sweep; `say` hears in a line
        of what nobody expects."""
        path = self.runs / job.name
        if is_run_folder(path):
            run = load_run(path, with_steps=False)
            if run.outcome == DAMAGED:
                say(f"{job.name} was damaged ({run.damage}); it is measured again")
            elif run.outcome == RUNNING:
                done = "was ended" if self._kill(run.record) else "was not started by this folder's sweep, and goes on"
                say(f"{job.name} was still running: process {run.record.pid} {done}")
        if path.exists():
            shutil.rmtree(path)

    def _kill(self, record: RunRecord) -> bool:
        """Kill the running process that a record says wrote it, where a sweep of this folder started it.

        A record may come from anywhere, and a process id in it proves nothing. So the process has to have the sweep's
        mark among the variables that it was started with. Those the kernel keeps, and no folder that is copied here can
        put them there.
        """
        with suppress(psutil.Error):
            process = psutil.Process(record.pid)
            if self.mark.items() <= process.environ().items():
                process.kill()
                return True
        return False

    def log_path(self, job: Job) -> Path:
        """Where the output of the job's process goes, until its run's folder can take it."""
        return self.runs / f".{job.name}.log"

    def begin(self, job: Job) -> None:
        """Note that a process is about to be started."""
        self._attempts.write(f"{job.name}\n")
        self._attempts.flush()

    def attempt(self, job: Job) -> int:
        """How often a process was started for the job."""
        self._attempts.seek(0)
        return self._attempts.read().splitlines().count(job.name)

    def config_path(self, cell: GridCell) -> Path | None:
        """The folder's copy of the cell's configuration. A side without a configuration has the base's."""
        names = [SIDE_CONFIG_FILE.format(cell.axes[SIDE])] if SIDE in cell.axes else []
        return next((self.path / name for name in (*names, CONFIG_FILE) if is_file(self.path / name)), None)


def read_sweep_folder(path: Path, trusts: bool = False) -> SweepFile:
    """The file of the sweep that a folder holds, to go on with.

    Where this user did not begin it, tells on standard error what going on would run, import and send; `trusts` makes
    it the user's own.

    Raises:
        UsageError: it holds none that this lmbench can read, or the user did not begin it.
    """
    contents = dict[str, bytes]()
    for name in _FILES:
        try:
            contents[name] = read_file(path / name, MAX_SWEEP_BYTES if name == SWEEP_FILE else MAX_YAML_BYTES)
        except Unreadable as error:
            if name == SWEEP_FILE or not error.is_missing:
                raise UsageError(f"{str(path)!r} holds no sweep: {name} cannot be read ({error})") from error
    try:
        content = sweep_from(decode(contents[SWEEP_FILE], StoredSweep).file).as_mapping()
        for options, name in _with_configs(content):
            options[CONFIG] = str(path / name)
        file = sweep_from(content)
    except (UsageError, DamagedRecord) as error:
        raise UsageError(f"{str(path)!r} holds no sweep: {SWEEP_FILE}: {error}") from error
    if not _is_trusted(contents, adds=trusts):
        tell(f"{path} was not begun here by you, or was changed since; going on would use")
        for line in dict.fromkeys(_actions(path, content, contents)):
            tell(f"  {line}")
        raise UsageError(f"nothing of {str(path)!r} was run; `lmbench sweep {path} --trust` takes it over")
    return file


def _actions(path: Path, file: Mapping[str, Any], contents: Mapping[str, bytes]) -> Iterator[str]:
    """In a line each, the settings of a folder's sweep that may run, import or read something, or send."""
    copies = {f"base.{CONFIG}", f"sides.A.{CONFIG}", f"sides.B.{CONFIG}"}
    for source, text in contents.items():
        tree = file if source == SWEEP_FILE else parse_yaml(text.decode(errors="replace"), source)
        for name, value in leaves(masked(tree)):
            # A class may be named without its module.
            is_code = may_run(value, path) or (isinstance(value, str) and value[:1].isupper())
            if name.startswith("environments."):
                yield f"program {name.removeprefix('environments.')}: {value}"
            elif "wandb" in name and value is not None:
                yield f"W&B {name}: {value}"
            elif is_code and not name.startswith("view") and name not in copies:
                yield f"code {name}: {value} ({source})"


def _is_trusted(contents: Mapping[str, bytes], adds: bool = False) -> bool:
    """Whether this user began or took over the sweep of these files; with `adds` it is the user's from now on."""
    digest = hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()
    # A user may have no home (RuntimeError).
    with suppress(OSError, RuntimeError):
        state = Path(os.environ.get("XDG_STATE_HOME", ""))
        path = (state if state.is_absolute() else Path.home() / ".local" / "state") / "lmbench" / "sweeps"
        if path.is_file() and digest in path.read_text().split():
            return True
        if adds:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(f"{digest}\n")
    return adds


def _with_configs(file: dict[str, Any]) -> list[tuple[Options, str]]:
    """The parts of a sweep's file that name a configuration, with the name of the folder's copy of it."""
    parts = {CONFIG_FILE: file.get("base", {})}
    parts |= {SIDE_CONFIG_FILE.format(side): options for side, options in file.get("sides", {}).items()}
    return [(options, name) for name, options in parts.items() if options.get(CONFIG) is not None]
