"""Writing a result: each run has a folder, in which `run.json` is replaced whole and `steps.jsonl` is appended to."""

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
#: File with all frames of the exception that ended a run.
TRACEBACK_FILE = "traceback.txt"

#: Description of a sweep, in its folder.
SWEEP_FILE = "sweep.json"
#: A file of a tuning's folder that no other folder has. Each stage of the tuning is a sweep, or several, below it.
TUNING_FILE = ".begun"
#: Folder of a sweep's runs, in the sweep's folder.
RUNS_FOLDER = "runs"
#: Table with a row for each cell, in the folder of a sweep that is done.
CELLS_FILE = "cells.csv"
#: Folder in which commands leave results by default, and in which names of results are looked up.
RESULTS = Path("results")

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+")


def time_stamp() -> str:
    """UTC time to the second, for names of folders."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def new_run_id() -> str:
    """UTC time and 8 random digits, so that runs of the same second, or after the clock was set back, differ.

    The digits come from the system, since a user may have seeded `random`.
    """
    return f"{time_stamp()}-{secrets.token_hex(4)}"


def is_made_up(path: str) -> bool:
    """Whether `new_run_id` made the last name of a path."""
    return re.fullmatch(r"(.*/)?\d{8}T\d{6}Z-[0-9a-f]{8}", path) is not None


def file_name(text: str) -> str:
    """The text as a plain file name: `-` in the place of what `check_name` refuses."""
    return _UNFIT.sub("-", text).strip("-.")


def check_name(what: str, name: str) -> None:
    """Raises UsageError for a name that is not a plain file name; `what` says what was to be named."""
    if _UNFIT.search(name) or name.startswith(".") or not name:
        raise UsageError(f"{what} {name!r}: only letters, digits and '_.-' of ASCII are allowed, and no '.' first")


class RunFolder:
    """The folder of a run that is being written; make one with `create`. The name of the folder is the run id.

    Steps that cannot be written, on a full disk, wait and are tried again with the next ones. `error` is the reason of
    the last failure, None when no steps wait. Everything else is written at once, so that a SIGKILL loses nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        self._file: TextIO | None = None
        #: Lines that wait for steps.jsonl, and the part of the first one that is in the file already.
        self._waiting, self._partial_line = b"", b""

    @classmethod
    def create(cls, results_dir: str | Path, run_id: str | None = None) -> RunFolder:
        """Make a new folder in `results_dir`, which is made if needed.

        Args:
            run_id: name of the folder; a `new_run_id` by default.

        Raises:
            UsageError: the folder cannot be made, or the run id is taken or not a plain file name.
        """
        parent = Path(results_dir).absolute()
        if run_id is not None:
            check_name("run id", run_id)
        path = parent / (run_id or new_run_id())
        problem = f"a file stands in the way of the results folder {str(results_dir)!r}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            return cls(path)
        except FileExistsError:
            if parent.is_dir():
                problem = f"run {path.name!r} exists already in the results folder {str(results_dir)!r}"
        except OSError as error:
            problem = f"results folder {str(results_dir)!r} cannot be written: {error.strerror}"
        raise UsageError(f"{problem}; choose another one")

    def reserve(self) -> None:
        """Occupy 64 KiB of the disk, so that a full disk still has room for a last run.json after `release`."""
        path = self.path / RESERVE_FILE
        try:
            path.write_bytes(bytes(64 * 1024))
        except OSError:
            self.release()

    def release(self) -> None:
        """Free the reserved space, if there is any."""
        with contextlib.suppress(OSError):
            (self.path / RESERVE_FILE).unlink(missing_ok=True)

    def write_run(self, run: RunRecord) -> None:
        """Replace run.json atomically: a reader sees either the old or the new one, even after a crash.

        Raises:
            OSError: the file cannot be written, such as on a full disk; the old run.json stays as it was.
        """
        write_whole(self.path / RUN_FILE, encode_run(run))
        # Without a sync of the folder a power cut can undo the renaming. Some file systems refuse such a sync.
        with contextlib.suppress(OSError):
            fd = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    @property
    def unwritten_count(self) -> int:
        """Number of steps that a reader does not find in the file."""
        return self._unread_lines.count(b"\n")

    @property
    def _unread_lines(self) -> bytes:
        # A line that lacks only its end is found.
        return self._waiting[1:] if self._waiting.startswith(b"\n") else self._partial_line + self._waiting

    def append_steps(self, records: Sequence[StepRecord]) -> None:
        """Write step records behind those that wait, one JSON object per line, in one write; never raises OSError."""
        self._waiting += b"".join(map(encode_step, records))
        self._write()

    def _write(self) -> None:
        try:
            while self._waiting:
                self._file = self._file or open_to_append(self.path / STEPS_FILE)
                # On a disk that gets full, a write may end within a line.
                count = os.write(self._file.fileno(), self._waiting)
                self._partial_line = (self._partial_line + self._waiting[:count]).rpartition(b"\n")[2]
                self._waiting = self._waiting[count:]
            self.error = None
        except OSError as error:
            self.error = error

    def waiting_steps(self) -> list[StepRecord]:
        """The step records that a reader does not find in the file."""
        return list(map(decode_step, self._unread_lines.splitlines()))

    def close(self) -> None:
        """Try once more to write the steps that wait, and sync the file to the disk; never raises OSError."""
        self._write()
        if self._file is not None:
            try:
                with self._file:
                    os.fsync(self._file.fileno())
            except OSError as error:
                self.error = error
            self._file = None


def write_or_refuse(path: Path, text: str, advice: str) -> None:
    """Write a file whole, in a folder that is made if there is none. Raises UsageError where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror}; {advice}") from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: a reader sees either the old or the new one, even after a crash.

    Raises:
        OSError: the file cannot be written, such as on a full disk; the old file stays as it was.
    """
    # The name is random and must be new: somebody else's folder may hold a link of a predictable name.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
