"""Where W&B's files of a result lie, and who may write there."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmbench.records.store import write_whole
from lmbench.wandb.problem import BoardProblem

_POLL_S = 0.1


class Place:
    """The folder `wandb` in a result folder: an offline run, a note about it, and a note once it was uploaded."""

    def __init__(self, result: Path) -> None:
        self.result = result
        self.path = result / "wandb"
        #: What wandb keeps of tables until they are uploaded.
        self.staging = self.path / "staging"
        self._mirror_note = self.path / "mirror.json"
        self._upload_note = self.path / "uploaded.json"

    @contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        """Only one process at a time writes or uploads; the lock goes with its process.

        Raises BoardProblem if another one still has it after `timeout_s`, or if nothing can be written there.
        """
        try:
            self.path.mkdir(exist_ok=True)
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as exc:
            raise BoardProblem(f"{self.path} cannot be written: {exc.strerror}") from exc
        try:
            deadline = time.monotonic() + timeout_s
            while not _take(lock):
                if time.monotonic() > deadline:
                    raise BoardProblem("another process is at it")
                time.sleep(_POLL_S)
            yield
        finally:
            os.close(lock)

    @property
    def mirror(self) -> dict[str, Any] | None:
        """The note about a complete offline run; None if there is none, or if its file is gone."""
        note = _read(self._mirror_note)
        return note if note and (self.path / note["file"]).is_file() else None

    def note_mirror(self, file: Path, **facts: Any) -> None:
        """Note that the offline run is complete. Raises OSError."""
        _write(self._mirror_note, {"file": str(file.relative_to(self.path)), **facts})

    @property
    def uploaded(self) -> dict[str, Any] | None:
        """The note of an upload: `uploaded_at`, `url`; None before it."""
        return _read(self._upload_note)

    def note_upload(self, **facts: Any) -> None:
        """Note the upload, once and for all. Raises OSError."""
        _write(self._upload_note, facts)

    def forget(self) -> None:
        """As if nothing had been written or uploaded."""
        self._upload_note.unlink(missing_ok=True)
        self.clear()

    def clear(self) -> None:
        """Remove an offline run, complete or not."""
        self._mirror_note.unlink(missing_ok=True)
        for folder in (*self.path.glob("offline-run-*"), self.staging):
            shutil.rmtree(folder, ignore_errors=True)


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path) -> dict[str, Any] | None:
    try:
        note = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def _write(path: Path, note: dict[str, Any]) -> None:
    """Write whole or not at all."""
    write_whole(path, json.dumps(note, indent=1))
