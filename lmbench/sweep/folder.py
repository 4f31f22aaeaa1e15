"""A sweep's folder: its files, who began it, which of its runs are done, and which process may write into it.

Going on with a sweep runs the programs and imports the code that its files name. So the user's own state folder keeps a
digest of each sweep's files and of its folder's inode: a folder from elsewhere, and a copy, have none there. A folder
that is moved within its file system keeps its digest.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

import psutil
import yaml
from msgspec import Struct

from lmbench.configs import MAX_YAML_BYTES, may_run, parse_yaml
from lmbench.errors import UsageError, tell
from lmbench.files import Unreadable, is_file, is_folder, open_to_append, read_file
from lmbench.masking import leaves, masked, masked_whole, masked_words
from lmbench.python_process import SWEEP
from lmbench.records.codec import MAX_PACKED_BYTES, DamagedRecord, decode, find_packed, indented_json
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.store import RUNS_FOLDER, SWEEP_FILE, write_whole
from lmbench.records.vocabulary import DAMAGED, RUNNING, SIDE, Values
from lmbench.sweep.file import CONFIG, Options, SweepFile, sweep_from
from lmbench.sweep.plan import GridCell, Job, Plan, axes_of
from lmbench.sweep.progress import SweepProgress

#: Copies of the configurations of base and sides. Without them, a changed original would affect only later runs.
_COPIES = {"base": "base.yaml", "A": "side-A.yaml", "B": "side-B.yaml"}
_FILES = (SWEEP_FILE, *_COPIES.values())
CHILD_LOG = "child.log"
_LOCK = ".lock"

#: Outcomes whose runs are not repeated when a sweep goes on.
FINAL = ("ok", "oom", "timeout", "error", "skipped")


class FolderTaken(UsageError):
    """Another process has locked a round of the sweep."""


class StoredSweep(Struct):
    """The parts of sweep.json that are read again.

    Attributes:
        file: the sweep's file, naming the folder's copies of configurations.
        command: repeats the sweep anywhere; empty where it is not known.
    """

    file: Values
    command: str = ""


class SweepFolder:
    """The folder of a plan, `<results_dir>/<name>`. `open` makes it and locks rounds in it."""

    def __init__(self, plan: Plan, path: Path, progress: SweepProgress) -> None:
        self.plan, self.progress = plan, progress
        self.path = path.absolute()
        self.runs = self.path / RUNS_FOLDER
        #: The environment variables that mark processes started by a sweep of this folder.
        self.mark = {SWEEP: str(self.path.resolve())}
        self._open = ExitStack()

    def open(self, rounds: Iterable[int], is_dry: bool = False) -> None:
        """Make the folder or go on with it, and lock rounds for this process. With `is_dry` only check that this works.

        Raises:
            FolderTaken: another process has locked one of the rounds.
            UsageError: the folder belongs to another sweep, or cannot be written.
        """
        try:
            if is_run_folder(self.path):
                raise UsageError(f"{self.path} is a run, which would hide the sweep's runs; give another --name")
            if is_dry and not os.path.lexists(self.path):
                parent = next(parent for parent in self.path.parents if parent.exists())
                if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
                    return
            self.runs.mkdir(parents=True, exist_ok=True)
            if not is_folder(self.runs):
                raise UsageError(f"{self.runs} is a link; remove it")
            lock = self._open.enter_context(open_to_append(self.path / _LOCK))
            # One byte for each round, since other processes may measure other rounds. Network file systems support such
            # locks, and the kernel releases them however this process ends.
            for repeat in rounds:
                _lock_byte(lock, repeat)
            # A run's name is its cell's id, the value that a search tried if there is one, and the repeat.
            ids = {cell.id for cell in self.plan.cells}
            for path in filter(is_run_folder, sorted(self.runs.iterdir())):
                if not any(path.name[: dash.start()] in ids for dash in re.finditer("-", path.name)):
                    raise UsageError(
                        f"{self.path} holds {path.name}, which is no cell of this sweep as it is now: "
                        "its settings were changed; give another --name, or remove that run"
                    )
            if not is_dry:
                self._write_plan()
        except BlockingIOError:
            # A caller may wait and open the folder again.
            self.close()
            problem = f"{self.path} is being written by another sweep; wait for it, or give --name"
            raise FolderTaken(problem) from None
        except OSError as error:
            problem = f"sweep folder {str(self.path)!r} cannot be written: {error.strerror}"
            raise UsageError(f"{problem}; choose another --results_dir") from error

    def close(self) -> None:
        """Release the locks."""
        self._open.close()

    def _write_plan(self) -> None:
        plan, file, texts = self.plan, self.plan.file.as_mapping(), {}
        for options, name in _with_configs(file):
            config = str(options[CONFIG])
            text, content = plan.configs[config]
            stored = masked_whole(content)
            texts[name] = text if stored == content else yaml.safe_dump(stored, sort_keys=False)
            options[CONFIG] = name
        # `lmbench sweep FOLDER` goes on, and is no command to repeat: the command that is there stays.
        earlier = find_packed(self.path / SWEEP_FILE, StoredSweep) or StoredSweep({})
        content = {
            "schema_version": SCHEMA_VERSION,
            "name": plan.name,
            "command": shlex.join(masked_words(plan.command)) or earlier.command,
            "view": plan.file.view,
            "axes": axes_of(cell.axes for cell in plan.cells),
            "cells": [{"id": cell.id, "axes": cell.axes} for cell in plan.cells],
            "file": masked_whole(file),
        }
        texts[SWEEP_FILE] = indented_json(content)
        # An earlier sweep of other sides may have left its copies.
        for name in set(_FILES) - texts.keys():
            (self.path / name).unlink(missing_ok=True)
        # The digest comes first, so that a sweep that is killed here can go on later.
        is_trusted(self.path, {name: text.encode() for name, text in texts.items()}, adds=True)
        for name, text in texts.items():
            write_whole(self.path / name, text)

    def final_record(self, job: Job) -> RunRecord | None:
        """The record of the job's run, None if there is none or it has to be repeated."""
        if not is_run_folder(self.runs / job.name):
            return None
        run = load_run(self.runs / job.name, with_steps=False)
        # Without `sweep` in its record, the sweep was killed before it closed the run. A run that is ok counts even so.
        is_final = run.outcome == "ok" or (run.outcome in FINAL and run.record.sweep is not None)
        return run.record if is_final else None

    def clear(self, job: Job) -> None:
        """Remove the folder of an earlier attempt, and kill its process if that outlived the sweep.

        A line of progress tells a damaged record, and a process that still ran.
        """
        path = self.runs / job.name
        if is_run_folder(path):
            run = load_run(path, with_steps=False)
            if run.outcome == DAMAGED:
                self.progress.keep(f"{job.name} was damaged ({run.damage}); it is measured again")
            elif run.outcome == RUNNING:
                done = "was ended" if self._kill(run.record) else "was not started by this folder's sweep, and goes on"
                self.progress.keep(f"{job.name} was still running: process {run.record.pid} {done}")
        if path.exists():
            shutil.rmtree(path)

    def _kill(self, record: RunRecord) -> bool:
        """Kill the process that a record names, if a sweep of this folder started it. Returns whether it was killed.

        A record may come from anywhere, so its process id proves nothing. The process must have been started with the
        sweep's mark as a variable. The kernel keeps these variables, and a copied folder cannot add the mark to them.
        """
        with suppress(psutil.Error):
            process = psutil.Process(record.pid)
            if self.mark.items() <= process.environ().items():
                process.kill()
                return True
        return False

    def log_path(self, job: Job) -> Path:
        """The file for the output of the job's process, which moves into the run's folder when the run ends."""
        return self.runs / f".{job.name}.log"

    def words(self, cell: GridCell) -> list[str]:
        """The cell's words, with the folder's copy of its configuration. A side without its own uses the base's."""
        copies = (self.path / _COPIES[part] for part in (cell.axes.get(SIDE, "base"), "base"))
        return cell.words(next(filter(is_file, copies), None))


def _lock_byte(file: TextIO, position: int) -> None:
    """Lock one byte of an open file for this process and its forks (`man 2 fcntl_locking`, F_OFD_SETLK).

    Raises:
        BlockingIOError: another process has locked it.
    """
    flock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, position, 1, 0)
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, flock)


def read_sweep_folder(path: Path, trusts: bool = False) -> SweepFile:
    """The file of the sweep in a folder, to go on with that sweep.

    `trusts` takes over a sweep that this user did not begin. Without it, such a sweep is refused after a list on
    standard error of everything that it would run, import and send.

    Raises:
        UsageError: the folder holds no sweep that this lmbench can read, or one that this user did not begin.
    """
    contents = {}
    for name in _FILES:
        try:
            contents[name] = read_file(path / name, MAX_PACKED_BYTES if name == SWEEP_FILE else MAX_YAML_BYTES)
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
    if not is_trusted(path, contents, adds=trusts):
        lines = dict.fromkeys(_actions(path, content, contents))
        tell(f"{path} was not begun here by you, or was changed since{'; going on would use' if lines else ''}")
        for line in lines:
            tell(f"  {line}")
        raise UsageError(
            f"nothing of {str(path)!r} was run; `lmbench sweep {shlex.quote(str(path))} --trust` takes it over"
        )
    return file


def _actions(path: Path, file: Values, contents: Mapping[str, bytes]) -> Iterator[str]:
    """A line for each setting of a folder's sweep that may run, import, read or send something."""
    copies = {f"base.{CONFIG}", f"sides.A.{CONFIG}", f"sides.B.{CONFIG}"}
    for source, text in contents.items():
        tree = file if source == SWEEP_FILE else parse_yaml(text.decode(errors="replace"), source)
        for name, value in leaves(tree, into_lists=True):
            # The command line also accepts a class by its name without the module.
            is_code = may_run(value, path) or (isinstance(value, str) and value[:1].isupper())
            shown_value = masked(value, name)
            if name.startswith("environments."):
                yield f"program {name.removeprefix('environments.')}: {shown_value}"
            elif "wandb" in name and value is not None:
                yield f"W&B {name}: {shown_value}"
            elif is_code and not name.startswith("view") and name not in copies:
                yield f"code {name}: {shown_value} ({source})"


def is_trusted(folder: Path, contents: Mapping[str, bytes], adds: bool = False) -> bool:
    """Whether this user began or took over the folder with these files. With `adds` the user takes it over now."""
    # A user may have no home (RuntimeError).
    with suppress(OSError, RuntimeError):
        digest = hashlib.sha256(repr((folder.stat().st_ino, sorted(contents.items()))).encode()).hexdigest()
        state = Path(os.environ.get("XDG_STATE_HOME", ""))
        path = (state if state.is_absolute() else Path.home() / ".local" / "state") / "lmbench" / "sweeps"
        if path.is_file() and digest in path.read_text().split():
            return True
        if adds:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(f"{digest}\n")
    return adds


def _with_configs(file: Values) -> list[tuple[Options, str]]:
    """The options of a sweep's base and sides that name a configuration, each with the name of the folder's copy."""
    parts = {"base": file.get("base", {}), **file.get("sides", {})}
    return [(options, _COPIES[part]) for part, options in parts.items() if options.get(CONFIG) is not None]
