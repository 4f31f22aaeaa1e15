"""Writing a result: one folder a run, `run.json` replaced whole, `steps.jsonl` only appended to."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from lmbench.errors import UsageError
from lmbench.files import open_to_append
from lmbench.records.codec import encode_run, encode_step
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
CELLS_FILE = "cells.csv"

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+")


def new_run_id(words: str = "") -> str:
    """UTC time, words and 8 random digits, so runs of the same second, or after the clock was set back, do not meet.

    The digits come from the system, as a user may have seeded `random`.
    """
    return "-".join(filter(None, (f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}", words, secrets.token_hex(4))))


def check_name(what: str, name: str) -> None:
    """Raises UsageError for what is no plain file name."""
    if _UNFIT.search(name) or name.startswith(".") or not name:
        raise UsageError(f"{what} {name!r}: only letters, digits and '_.-' are allowed, and no '.' first")


class RunFolder:
    """The folder of one run that is being written. `path` is the folder, its name the run id, `steps_written` how
    many step records it took.

    Use `create`. Nothing waits in a buffer of this process: after a SIGKILL all that was handed over is
    there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps_written = 0
        self._steps_fd: int | None = None
        self._ends_torn = False

    @classmethod
    def create(cls, results_dir: str | Path, run_id: str | None = None, slug: str = "") -> RunFolder:
        """Make a new folder under `results_dir` (made as needed); it never takes over an existing one.

        Without `run_id` it has a `new_run_id`. Raises UsageError if the folder cannot be made, or if `run_id` is taken
        or no plain file name.
        """
        parent = Path(results_dir).absolute()
        if run_id is not None:
            check_name("run id", run_id)
        path = parent / (run_id or new_run_id(_UNFIT.sub("-", slug).strip("-.")[:60]))
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

    @property
    def run_id(self) -> str:
        return self.path.name

    def reserve(self) -> None:
        """Take up space now, so that after a `release` a disk that filled up still has room for a last run.json."""
        path = self.path / RESERVE_FILE
        for size_kib in (64, 32, 16, 8):
            try:
                path.write_bytes(bytes(size_kib * 1024))
            except OSError:
                self.release()
            else:
                return

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

    def append_steps(self, records: Iterable[StepRecord]) -> None:
        """Append step records, one JSON object a line, in one write.

        Raises OSError if not all could be written: the lines that fitted are kept whole, a partial one is cut
        off, and later calls may go on.
        """
        lines = [encode_step(record) for record in records]
        data = b"".join(lines)
        if not data:
            return
        if self._steps_fd is None:
            with open_to_append(self.path / STEPS_FILE) as file:
                self._steps_fd = os.dup(file.fileno())
        if self._ends_torn:
            data = b"\n" + data
        start, written = os.fstat(self._steps_fd).st_size, 0
        try:
            while written < len(data):
                written += os.write(self._steps_fd, data[written:])
        except OSError:
            kept = data[: data.rfind(b"\n", 0, written) + 1]
            self.steps_written += kept.count(b"\n") - kept.startswith(b"\n")
            try:
                os.ftruncate(self._steps_fd, start + len(kept))
            except OSError:
                # A partial line stays; the next write begins a new one, so that only this one is lost.
                self._ends_torn = self._ends_torn or written > len(kept)
            raise
        self.steps_written += len(lines)
        self._ends_torn = False

    def close(self) -> None:
        """Bring the steps to the disk and close their file; may be called again.

        Raises OSError if they cannot.
        """
        if self._steps_fd is None:
            return
        fd, self._steps_fd = self._steps_fd, None
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


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
