"""A sweep's folder: what it is, which of its runs are done, and who may write into it. All paths in it are relative."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import psutil
import yaml
from msgspec import Struct

from lmbench.errors import UsageError
from lmbench.files import Unreadable, is_file, read_file
from lmbench.masking import masked_whole
from lmbench.records.codec import DamagedRecord, decode, indented_json
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.process import is_running
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.store import MAX_SWEEP_BYTES, RUNS_FOLDER, SWEEP_FILE, write_whole
from lmbench.records.vocabulary import DAMAGED, RUNNING, SIDE
from lmbench.sweep.file import CONFIG, Options, SweepFile, sweep_from
from lmbench.sweep.plan import GridCell, Job, Plan, axes_of

#: Copies of configurations, the base's and those of sides, so that a change of the original meets no half of a sweep.
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


class StoredSweep(Struct):
    """What is read again from sweep.json: the sweep's file, with the folder's copies of configurations."""

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
            # The kernel lets go of it when this process ends, however it does.
            self._lock = (self.path / _LOCK).open("a+")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / _LOCK).write_text(str(os.getpid()))
            # Compiled code would be run: this sweep trusts none that another process left.
            self.remove_compile_cache()
            self._refuse_other_cells(plan)
            self._write_plan(plan)
            (self.path / ATTEMPTS_FILE).touch()
            self._attempts = Counter((self.path / ATTEMPTS_FILE).read_text().splitlines())
        except BlockingIOError:
            writer = (self.path / _LOCK).read_text()
            raise UsageError(
                f"{self.path} is being written by another sweep (process {writer}); wait for it, or give --name"
            ) from None
        except OSError as error:
            problem = f"sweep folder {str(self.path)!r} cannot be written: {error.strerror}"
            raise UsageError(f"{problem}; choose another --results_dir") from error

    def close(self) -> None:
        """Let others have it; may be called again."""
        if self._lock is not None:
            self._lock.close()

    def _refuse_other_cells(self, plan: Plan) -> None:
        # A run is named by its cell and its repeat, in between stands the value that a search tries.
        ids = {cell.id for cell in plan.cells}
        for path in filter(is_run_folder, sorted(self.runs.iterdir())):
            if not any(path.name[: dash.start()] in ids for dash in re.finditer("-", path.name)):
                raise UsageError(
                    f"{self.path} holds {path.name}, which is no cell of this sweep as it is now: "
                    "its settings were changed; give another --name, or remove that run"
                )

    def _write_plan(self, plan: Plan) -> None:
        file = plan.file.as_mapping()
        for options, name in _with_configs(file):
            text = plan.configs[str(options[CONFIG])]
            content = yaml.safe_load(text)
            stored = masked_whole(content)
            write_whole(self.path / name, text if stored == content else yaml.safe_dump(stored, sort_keys=False))
            options[CONFIG] = name
        content = {
            "schema_version": SCHEMA_VERSION,
            "name": plan.name,
            "view": plan.file.view,
            "axes": axes_of([cell.axes for cell in plan.cells]),
            "cells": [{"id": cell.id, "axes": cell.axes, "options": masked_whole(cell.options)} for cell in plan.cells],
            "file": masked_whole(file),
        }
        write_whole(self.path / SWEEP_FILE, indented_json(content))

    def finished(self, job: Job) -> RunRecord | None:
        """The record of the job's run, where it has one that is not to be tried again."""
        path = self.runs / job.name
        if not is_run_folder(path):
            return None
        run = load_run(path, with_steps=False)
        # Without its place in the sweep nobody saw it end; what it measured counts all the same.
        is_final = run.outcome == "ok" or (run.outcome in FINAL and run.record.sweep is not None)
        return run.record if is_final else None

    def clear(self, job: Job) -> str | None:
        """Remove what an earlier attempt left, and end its process where that outlived its sweep.

        Returns in a line what was there that nobody expects.
        """
        path, surprise = self.runs / job.name, None
        if is_run_folder(path):
            run = load_run(path, with_steps=False)
            if run.outcome == DAMAGED:
                surprise = f"{job.name} was damaged ({run.damage}); it is measured again"
            elif run.outcome == RUNNING:
                done = "was ended" if self._kill(run.record) else "was not started by this folder's sweep, and goes on"
                surprise = f"{job.name} was still running: process {run.record.pid} {done}"
        if path.exists():
            shutil.rmtree(path)
        return surprise

    def _kill(self, record: RunRecord) -> bool:
        """Kill the process that a record says wrote it, where a sweep of this folder started it; returns whether.

        A record may come from anywhere, and a process id in it proves nothing. So the process has to be of this boot,
        to have begun when the record says, and to have the sweep's mark among the variables that it was started with.
        Those the kernel keeps, and no folder that is copied here can put them there.
        """
        pid, start_s = record.pid, record.process_start_s
        with suppress(psutil.Error):
            if pid is not None and start_s is not None and is_running(pid, record.boot_id, start_s):
                process = psutil.Process(pid)
                if self.mark.items() <= process.environ().items():
                    process.kill()
                    return True
        return False

    def log_path(self, job: Job) -> Path:
        """Where the output of the job's process goes, until its run's folder can take it."""
        return self.runs / f".{job.name}.log"

    def begin(self, job: Job) -> None:
        """Note that a process is about to be started."""
        self._attempts[job.name] += 1
        with (self.path / ATTEMPTS_FILE).open("a") as file:
            file.write(f"{job.name}\n")

    def attempt(self, job: Job) -> int:
        """How often a process was started for the job."""
        return self._attempts[job.name]

    def config_path(self, cell: GridCell) -> Path | None:
        """The folder's copy of the cell's configuration. A side without a configuration has the base's."""
        names = (SIDE_CONFIG_FILE.format(cell.axes.get(SIDE)), CONFIG_FILE)
        return next((self.path / name for name in names if is_file(self.path / name)), None)

    def remove_compile_cache(self) -> None:
        shutil.rmtree(self.path / COMPILE_CACHE, ignore_errors=True)


def read_sweep_folder(path: Path) -> SweepFile:
    """The file of the sweep that a folder holds.

    Raises:
        UsageError: it holds none that this lmbench can read.
    """
    try:
        file = decode(read_file(path / SWEEP_FILE, MAX_SWEEP_BYTES), StoredSweep).file
    except (Unreadable, DamagedRecord) as error:
        raise UsageError(f"{str(path)!r} holds no sweep: {SWEEP_FILE} cannot be read ({error})") from error
    try:
        content = sweep_from(file).as_mapping()
        for options, name in _with_configs(content):
            options[CONFIG] = str(path / name)
        return sweep_from(content)
    except UsageError as error:
        raise UsageError(f"{path / SWEEP_FILE}: {error}") from error


def _with_configs(file: dict[str, Any]) -> list[tuple[Options, str]]:
    """The parts of a sweep's file that name a configuration, with the name of the folder's copy of it."""
    parts = [(file.get("base", {}), CONFIG_FILE)]
    parts += [(options, SIDE_CONFIG_FILE.format(side)) for side, options in file.get("sides", {}).items()]
    return [(options, name) for options, name in parts if options.get(CONFIG) is not None]
