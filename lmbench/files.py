"""Files that somebody else may have made: only regular files are read, at most as many bytes as allowed, and no link
out of their folder; and folders in the temporary directory that do not stay there.

A result comes from a colleague, a cluster, a download. What looks like its run.json may be a pipe that never ends, a
link to a device or to another person's file, or four megabytes of gzip that unpack to eight gigabytes.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

_GZIP = b"\x1f\x8b"
_CHUNK_BYTES = 2**20


class Unreadable(Exception):
    """The reason why a file is not read, or not to its end: a line without the file's name, `it is a pipe, no file`.

    `is_missing` where there is no such file.
    """

    def __init__(self, reason: str, is_missing: bool = False) -> None:
        super().__init__(reason)
        self.is_missing = is_missing


def read_file(path: Path, most_bytes: int, follows_links: bool = False, unpacks: bool = False) -> bytes:
    """The content of a regular file of at most `most_bytes`; with `unpacks` also of what a gzip file holds.

    A file that the user named may be a link (`follows_links`); a link in a result folder is followed only to another
    file of the same folder.

    Raises:
        Unreadable: it is missing, no regular file, a link that leads out of its folder, larger, or may not be read, or
            a gzip file that is damaged or ends early.
    """
    pieces: list[bytes] = []
    left_bytes = most_bytes
    with open_file(path, follows_links) as file:
        is_packed = unpacks and file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        stream = gzip.GzipFile(fileobj=file) if is_packed else file
        try:
            # In pieces, since a single read would allocate as much as is allowed.
            while left_bytes >= 0 and (piece := stream.read(min(_CHUNK_BYTES, left_bytes + 1))):
                pieces.append(piece)
                left_bytes -= len(piece)
        except (OSError, EOFError, zlib.error) as error:
            raise Unreadable(f"it is damaged: {error}") from None
    if left_bytes < 0:
        raise Unreadable(f"it holds more than {most_bytes / 2**20:,g} MiB, which is the most that is read")
    return b"".join(pieces)


@contextmanager
def open_file(path: Path, follows_links: bool = False) -> Iterator[BinaryIO]:
    """A regular file for reading in binary. Raises Unreadable as `read_file`, whatever its size."""
    try:
        if path.is_symlink() and not follows_links:
            path = inside(path.parent, path.name)
        if not stat.S_ISREG(path.stat().st_mode):
            raise Unreadable("it is no regular file")
        file = path.open("rb")
    except FileNotFoundError:
        raise Unreadable("it is missing", is_missing=True) from None
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror}") from None
    except ValueError:
        raise Unreadable("its name is no path") from None
    with file:
        yield file


def open_to_append(path: Path) -> TextIO:
    """A file of a folder to read and to append to, made where it is missing.

    Raises:
        OSError: it is a link, no regular file, or has another name: what is written would lie in a file of elsewhere.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(fd)
        raise OSError(errno.EMLINK, f"{path.name} there is another file's second name, or no file; remove it")
    return os.fdopen(fd, "a+", encoding="utf-8")


def is_file(path: Path) -> bool:
    """Whether `open_file` opens it: a regular file, or a link to one in the same folder."""
    try:
        with open_file(path):
            return True
    except Unreadable:
        return False


def is_folder(path: Path) -> bool:
    """Whether there is a folder that is no link."""
    return os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114 (which raise on some paths)


def inside(folder: Path, name: str) -> Path:
    """The real path of a file that a record names, relative to its folder.

    Raises:
        Unreadable: the path leads out of the folder, by `..`, as an absolute path or through links.
    """
    try:
        path, home = (folder / name).resolve(), folder.resolve()
    except (OSError, ValueError, RuntimeError):
        raise Unreadable(f"{name!r} is no path") from None
    if path == home or not path.is_relative_to(home):
        raise Unreadable(f"{name!r} leads out of its folder")
    return path


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
