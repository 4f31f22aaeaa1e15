"""Folders in the temporary directory that do not stay there, also when their process was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from lmbench.files import is_folder

_LOCK = ".lmbench-lock"


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A folder `lmbench-PURPOSE-...`, removed at the end of a `with` block or of the process.

    The process holds a lock in it, which the kernel lets go of however the process ends. Whoever makes the next
    scratch folder removes those whose locks nobody holds.
    """

    def __init__(self, purpose: str) -> None:
        for lock in Path(tempfile.gettempdir()).glob(f"lmbench-*/{_LOCK}"):
            folder = lock.parent
            with suppress(OSError):
                if is_folder(folder) and folder.stat().st_uid == os.getuid() and not lock.is_symlink():
                    with lock.open() as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(folder, ignore_errors=True)
        super().__init__(prefix=f"lmbench-{purpose}-", ignore_cleanup_errors=True)
        # Locked before it has the name by which others look for it.
        new = Path(self.name, ".new")
        self._lock = new.open("x")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(new.with_name(_LOCK))
