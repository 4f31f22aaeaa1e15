"""A sweep's folder: what it is, which of its runs are done, and who may write into it. All paths in it are relative."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import psutil
import yaml
from msgspec import Struct, to_builtins

from lmbench.errors import UsageError
from lmbench.files import Unreadable, is_file, is_folder, read_file
from lmbench.masking import masked_whole
from lmbench.records.codec import DamagedRecord, decode, indented_json
from lmbench.records.load import Run, is_run_folder, load_run
from lmbench.records.process import is_running
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.store import CELLS_FILE, MAX_SWEEP_BYTES, RUNS_FOLDER, SWEEP_FILE, write_whole
from lmbench.records.vocabulary import DAMAGED, RUNNING, SIDE
from lmbench.sweep.file import CONFIG, Options, SweepFile, sweep_from
from lmbench.sweep.largest import trial_pattern
from lmbench.sweep.plan import GridCell, Job, Plan, axes_of

#: Configurations, the base's and those of sides: copies, so that a change of the original meets no half of a sweep.
CONFIG_FILE = "base.yaml"
SIDE_CONFIG_FILE = "side-{}.yaml"
#: The name of a run for every process that was started.
ATTEMPTS_FILE = "attempts.txt"
#: What compiling left for later repeats; gone when the sweep is done.
COMPILE_CACHE = "compile_cache"
CHILD_LOG = "child.log"
#: The environment variable that every process of a sweep has: which folder it works for.
MARK = "LMBENCH_SWEEP"
_LOCK = ".lock"

#: Outcomes that are not tried again.
FINAL = ("ok", "oom", "timeout", "error", "skipped")
_RUN_NAME = r"(?P<cell>.+)-r\d+"


class StoredCell(Struct):
    """A cell as it is read again from sweep.json."""

    id: str


class StoredSweep(Struct):
    """What is read again from sweep.json. `file` is the sweep's file, with the folder's copies of configurations."""

    schema_version: int
    cells: list[StoredCell]
    file: dict[str, Any]


class SweepFolder:
    """`<results_dir>/<name>`; made by `open`, which also locks it."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.runs = self.path / RUNS_FOLDER
        self._lock: TextIO | None = None
        self._attempts: Counter[str] = Counter()

    @property
    def mark(self) -> dict[str, str]:
        """The variables by which processes that a sweep of this folder started are known again."""
        return {MARK: str(self.path.resolve())}

    def open(self, plan: Plan) -> None:
        """Make the folder or go on with it, for this process alone.

        Raises:
            UsageError: another process has it, it is another sweep's, or it cannot be written.
        """
        try:
            self.runs.mkdir(parents=True, exist_ok=True)
            if not is_folder(self.runs):
                raise UsageError(f"{self.runs} is a link, and runs are not written through it; give another --name")
            self._take_lock()
            # Compiled code would be run: what another process left is none that this one trusts.
            self.remove_compile_cache()
            self._refuse_strangers(plan)
            self._write_plan(plan)
            os.close(_open_without_link(self.path / ATTEMPTS_FILE, os.O_WRONLY))
            with suppress(Unreadable):
                self._attempts = Counter(read_file(self.path / ATTEMPTS_FILE, MAX_SWEEP_BYTES).decode().splitlines())
        except OSError as error:
            self.close()
            raise UsageError(
                f"sweep folder {str(self.path)!r} cannot be written: {error.strerror}; choose another --results_dir"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others have it; may be called again."""
        if self._lock is not None:
            self._lock.close()

    def known_cells(self) -> set[str]:
        """Ids of the cells that the sweep had when it was last begun here."""
        with suppress(Unreadable, DamagedRecord):
            return {cell.id for cell in _read_stored(self.path).cells}
        return set()

    def _take_lock(self) -> None:
        # The kernel lets go of it when this process ends, however it does.
        self._lock = os.fdopen(_open_without_link(self.path / _LOCK, os.O_RDWR), "r+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{self.path} is being written by another sweep (process {self._lock.read(100)}); "
                "wait for it, or give --name"
            ) from None
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    def _write_plan(self, plan: Plan) -> None:
        file = plan.file.as_mapping()
        for options, name in _configured(file):
            write_whole(self.path / name, _without_secrets(plan.configs[str(options[CONFIG])]))
            options[CONFIG] = name
        content = {
            "name": plan.name,
            "view": plan.file.view,
            "axes": axes_of([cell.axes for cell in plan.cells]),
            "cells": [
                {"id": cell.id, "axes": cell.axes, "command": cell.command, "options": masked_whole(cell.options)}
                for cell in plan.cells
            ],
            "environments": {name: masked_whole(to_builtins(each.facts)) for name, each in plan.environments.items()},
            "file": masked_whole(file),
        }
        write_whole(self.path / SWEEP_FILE, indented_json({"schema_version": SCHEMA_VERSION, **content}))

    def _refuse_strangers(self, plan: Plan) -> None:
        ids = {cell.id for cell in plan.cells}
        searched = plan.file.largest
        for path in sorted(self.runs.iterdir()):
            match = re.fullmatch(_RUN_NAME, path.name)
            if match is not None and searched is not None:
                match = re.fullmatch(trial_pattern(searched), match["cell"]) or match
            if path.is_dir() and match is not None and match["cell"] not in ids and is_run_folder(path):
                raise UsageError(
                    f"{self.path} holds {path.name}, which is no cell of this sweep as it is now: "
                    "its settings were changed; give another --name, or remove that run"
                )

    def finished(self, job: Job) -> Run | None:
        """The job's run, where it has one that is not to be tried again."""
        path = self.runs / job.name
        if path.is_symlink() or not is_run_folder(path):
            return None
        run = load_run(path, with_steps=False)
        # Without its place in the sweep nobody saw it end; what it measured counts all the same.
        is_final = run.outcome == "ok" or (run.outcome in FINAL and run.record.sweep is not None)
        return run if is_final else None

    def clear(self, job: Job) -> str | None:
        """Remove what an earlier attempt left, and end its process where that outlived its sweep.

        Returns in a line what was there that nobody expects.
        """
        path = self.runs / job.name
        surprise = None
        if path.is_symlink():
            surprise = f"{job.name} was a link, which is removed; it is measured again"
        elif is_run_folder(path):
            left = load_run(path, with_steps=False)
            if left.outcome == DAMAGED:
                surprise = f"{job.name} was damaged ({left.damage}); it is measured again"
            if left.outcome == RUNNING:
                is_ended = _kill_marked(left.record, self.mark)
                done = "it was ended" if is_ended else "no sweep of this folder started that, and it is left alone"
                surprise = f"{job.name} was still running (process {left.record.pid}); {done}"
        if is_folder(path):
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        return surprise

    def log_path(self, job: Job) -> Path:
        """Where the output of the job's process goes, until its run's folder can take it."""
        return self.runs / f".{job.name}.log"

    def begin(self, job: Job) -> None:
        """Note that a process is about to be started."""
        self._attempts[job.name] += 1
        with os.fdopen(_open_without_link(self.path / ATTEMPTS_FILE, os.O_WRONLY | os.O_APPEND), "a") as file:
            file.write(f"{job.name}\n")

    def attempt(self, job: Job) -> int:
        """How often a process was started for the job."""
        return self._attempts[job.name]

    def config_path(self, cell: GridCell) -> Path | None:
        """The folder's copy of the cell's configuration."""
        name = SIDE_CONFIG_FILE.format(cell.axes[SIDE]) if SIDE in cell.axes else CONFIG_FILE
        # A side without a configuration has the base's.
        paths = [path for path in (self.path / name, self.path / CONFIG_FILE) if is_file(path)]
        return paths[0] if paths else None

    def write_cells(self, table: str) -> None:
        """Write the sweep's cells as CSV. Raises OSError."""
        write_whole(self.path / CELLS_FILE, table)

    def remove_compile_cache(self) -> None:
        shutil.rmtree(self.path / COMPILE_CACHE, ignore_errors=True)


def read_sweep_folder(path: Path) -> SweepFile:
    """The file of the sweep that a folder holds.

    Raises:
        UsageError: it holds none that this lmbench can read.
    """
    try:
        stored = _read_stored(path)
    except (Unreadable, DamagedRecord) as error:
        raise UsageError(f"{str(path)!r} holds no sweep: {SWEEP_FILE} cannot be read ({error})") from error
    if stored.schema_version != SCHEMA_VERSION:
        raise UsageError(
            f"{str(path)!r} has schema version {stored.schema_version}, this lmbench reads {SCHEMA_VERSION}"
        )
    try:
        file = sweep_from(stored.file).as_mapping()
        for options, name in _configured(file):
            if not is_file(path / name):
                raise UsageError(f"{name} is missing, or no file of its own")
            options[CONFIG] = str(path / name)
        return sweep_from(file)
    except UsageError as error:
        raise UsageError(f"{path / SWEEP_FILE}: {error}") from error


def _read_stored(path: Path) -> StoredSweep:
    return decode(read_file(path / SWEEP_FILE, MAX_SWEEP_BYTES), StoredSweep)


def _open_without_link(path: Path, flags: int) -> int:
    """Open a file of the folder for writing, made as needed; through a link it would be somebody else's that is
    written, and a pipe would be waited for. Raises OSError."""
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def _kill_marked(record: RunRecord, mark: Mapping[str, str]) -> bool:
    """Kill the process that a record says wrote it, where a sweep of this folder started it; returns whether it did.

    A record may come from anywhere, and a process id in it proves nothing. So the process has to be of this boot, to
    have begun when the record says, and to have the sweep's mark among the variables that it was started with. Those
    the kernel keeps, and no folder that is copied here can put them there.
    """
    if record.pid is None or record.process_start_s is None:
        return False
    try:
        if not is_running(record.pid, record.boot_id, record.process_start_s):
            return False
        process = psutil.Process(record.pid)
        if not mark.items() <= process.environ().items():
            return False
        process.kill()
    except psutil.Error:
        return False
    return True


def _without_secrets(config: str) -> str:
    """A configuration's text as it is kept."""
    content = yaml.safe_load(config)
    kept = masked_whole(content)
    return config if kept == content else yaml.safe_dump(kept, sort_keys=False)


def _configured(file: dict[str, Any]) -> list[tuple[Options, str]]:
    """The parts of a sweep's file that name a configuration, with the name of the folder's copy of it."""
    parts = [(file.get("base", {}), CONFIG_FILE)]
    parts += [(options, SIDE_CONFIG_FILE.format(side)) for side, options in file.get("sides", {}).items()]
    return [(options, name) for options, name in parts if options.get(CONFIG) is not None]
