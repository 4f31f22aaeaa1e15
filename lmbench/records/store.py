"""Writing a result: one folder a run, `run.json` replaced whole, `steps.jsonl` only appended to."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from lmbench.errors import UsageError
from lmbench.files import open_to_append
from lmbench.records.codec import decode_step, encode_run, encode_step
from lmbench.records.run import RunRecord
from lmbench.records.step import StepRecord

RUN_FILE = "run.json"
STEPS_FILE = "steps.jsonl"
RESERVE_FILE = ".reserve"
#: All frames of the exception that ended a run.
TRACEBACK_FILE = "traceback.txt"

#: A sweep's folder: what it is, its runs' folders, and (when it is done) a row for each cell.
SWEEP_FILE = "sweep.json"
#: Its file has 500 bytes a cell.
MAX_SWEEP_BYTES = 64 * 2**20
RUNS_FOLDER = "runs"
#: Where commands leave results unless they are told otherwise, and where names are looked up.
RESULTS = Path("results")
CELLS_FILE = "cells.csv"

#: Steps that may wait while the disk is full; later ones are dropped and counted.
MAX_WAITING_BYTES = 100 * 2**20

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+")


def new_run_id() -> str:
    """UTC time and 8 random digits, so runs of the same second, or after the clock was set back, do not meet.

    The digits come from the system, as a user may have seeded `random`.
    """
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


def check_name(what: str, name: str) -> None:
    """Raises UsageError for what is no plain file name."""
    if _UNFIT.search(name) or name.startswith(".") or not name:
        raise UsageError(f"{what} {name!r}: only letters, digits and '_.-' are allowed, and no '.' first")


class RunFolder:
    """The folder of one run that is being written. `path` is the folder, its name the run id.

    Use `create`. Steps that cannot be written, on a disk that is full, wait and are tried again with the next ones:
    `error` is why the last try failed, None when nothing waits. Nothing else waits in this process: after a SIGKILL all
    that was handed over is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        self._file: TextIO | None = None
        #: Lines on their way into steps.jsonl, and the first one's beginning where that is in the file.
        self._waiting, self._begun = b"", b""
        self._dropped_count = 0

    @classmethod
    def create(cls, results_dir: str | Path, run_id: str | None = None) -> RunFolder:
        """Make a new folder under `results_dir` (made as needed); it never takes over an existing one.

        Without `run_id` it has a `new_run_id`. Raises UsageError if the folder cannot be made, or if `run_id` is taken
        or no plain file name.
        """
        parent = Path(results_dir).absolute()
        if run_id is not None:
            check_name("run id", run_id)
        path = parent / (run_id or new_run_id())
        problem = f"results folder {str(results_dir)!r} cannot be written"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except FileExistsError:
            problem = f"a file stands in the way of the results folder {str(results_dir)!r}"
            if parent.is_dir():
                problem = f"run {path.name!r} exists already in the results folder {str(results_dir)!r}"
        except OSError as error:
            problem += f": {error.strerror}"
        else:
            return cls(path)
        raise UsageError(f"{problem}; choose another one")

    def reserve(self) -> None:
        """Take up space now, so that after a `release` a disk that filled up still has room for a last run.json."""
        path = self.path / RESERVE_FILE
        try:
            path.write_bytes(bytes(64 * 1024))
        except OSError:
            self.release()

    def release(self) -> None:
        """Give the reserved space back; may be called again."""
        with contextlib.suppress(OSError):
            (self.path / RESERVE_FILE).unlink(missing_ok=True)

    def write_run(self, run: RunRecord) -> None:
        """Replace run.json in one move: a reader sees the old or the new one, also after a crash.

        Raises OSError (a full disk, say); the old run.json is then as it was.
        """
        write_whole(self.path / RUN_FILE, encode_run(run).decode())
        # Without this a power cut can undo the move. Some file systems refuse to sync a folder.
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            fd = os.open(self.path, os.O_RDONLY)
            stack.callback(os.close, fd)
            os.fsync(fd)

    @property
    def unwritten_count(self) -> int:
        """Steps that are not in the file: those that wait and those that were dropped."""
        return self._waiting.count(b"\n") + self._dropped_count

    def append_steps(self, records: Sequence[StepRecord]) -> None:
        """Write step records after those that wait, one JSON object a line, in one write; never raises OSError."""
        if len(self._waiting) < MAX_WAITING_BYTES:
            self._waiting += b"".join(map(encode_step, records))
        else:
            self._dropped_count += len(records)
        self._write()

    def _write(self) -> None:
        try:
            while self._waiting:
                self._file = self._file or open_to_append(self.path / STEPS_FILE)
                count = os.write(self._file.fileno(), self._waiting)
                # What fits is in the file, if only the beginning of a line.
                self._begun = (self._begun + self._waiting[:count]).rpartition(b"\n")[2]
                self._waiting = self._waiting[count:]
            self.error = None
        except OSError as error:
            self.error = error

    def waiting_steps(self) -> list[StepRecord]:
        """The records that are not, or not wholly, in the file."""
        return list(map(decode_step, (self._begun + self._waiting).splitlines()))

    def close(self) -> None:
        """Try once more to write what waits, and bring the steps to the disk; never raises OSError."""
        self._write()
        if self._file is not None:
            try:
                with self._file:
                    os.fsync(self._file.fileno())
            except OSError as error:
                self.error = error
            self._file = None


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one move: a reader sees the old or the new one, also after a crash.

    Raises OSError (a full disk, say); the old file is then as it was.
    """
    # Not over what lies there: a folder of somebody else's may hold a link of that name.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
