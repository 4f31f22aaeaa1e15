"""Safe reading and writing of files that somebody else may have made, and temporary folders that are always removed.

A result may come from a colleague, a cluster or a download. Its run.json may be a pipe that never ends, or a link to a
device or to another person's file; four megabytes of gzip may unpack to eight gigabytes. So only regular files are
read, only up to a limit of bytes, and links are not followed out of their folder.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import os
import pickle
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TextIO

_GZIP = b"\x1f\x8b"
_CHUNK_BYTES = 2**20


class Unreadable(Exception):
    """A file cannot be read, or not to its end; the message is a line without the file's name, `it is missing`.

    `is_missing` is true where the file does not exist.
    """

    def __init__(self, reason: str, is_missing: bool = False) -> None:
        super().__init__(reason)
        self.is_missing = is_missing


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, and plain values name nothing; not run")


def plain_unpickled(content: bytes) -> Any:
    """The containers, texts and numbers in a pickle.

    A pickle is a program. Names of classes and functions, and persistent ids, are refused with an UnpicklingError; a
    damaged pickle can raise any error.
    """
    return _PlainUnpickler(BytesIO(content)).load()


def read_file(path: Path, most_bytes: int, follows_links: bool = False, unpacks: bool = False) -> bytes:
    """The content of a regular file.

    Args:
        most_bytes: largest content that is read.
        follows_links: follow any link, for a file that the user named. By default a link is followed only to another
            file of the same folder.
        unpacks: unpack the content of a gzip file.

    Raises:
        Unreadable: the file is missing, not a regular file, a link out of its folder, too large, or not permitted; or
            its gzip data is damaged or ends early.
    """
    pieces = []
    left_bytes = most_bytes
    with open_file(path, follows_links) as file:
        is_packed = unpacks and file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        stream = gzip.GzipFile(fileobj=file) if is_packed else file
        try:
            # Read in pieces, since a single read would allocate `most_bytes` at once.
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
    """Open a regular file of any size for reading in binary.

    Raises:
        Unreadable: the file is missing, not a regular file, a link out of its folder, or not permitted.
    """
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
    """Open a file for reading and appending; it is made where it is missing.

    Raises:
        OSError: the file is a link, not a regular file, or has a second name (a hard link): the text would be written
            to a file in another place.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(fd)
        raise OSError(errno.EMLINK, f"{path.name} there is another file's second name, or no file; remove it")
    return os.fdopen(fd, "a+", encoding="utf-8")


def is_file(path: Path) -> bool:
    """Whether the path is a regular file, or a link to one in the same folder."""
    try:
        with open_file(path):
            return True
    except Unreadable:
        return False


def is_folder(path: Path) -> bool:
    """Whether the path is a folder, and not a link to one."""
    return os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114 (which raise on some paths)


def names_file(text: str | Path) -> bool:
    """Whether what a user gave is a file, or a link to one anywhere; a name may be too long for one."""
    return os.path.isfile(text)  # noqa: PTH113 (Path.is_file raises on some paths)


def short_digest(text: str, digits: int = 8) -> str:
    """The first hexadecimal digits of a text's SHA-256; bytes that were no UTF-8 are surrogates in it."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:digits]


def cache_folder() -> Path:
    """lmbench's folder in the user's cache, by the XDG Base Directory Specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmbench"


def inside(folder: Path, name: str) -> Path:
    """The real path of a file that is named relative to a folder.

    Raises:
        Unreadable: the path leads out of the folder, by `..`, as an absolute path or through links.
    """
    try:
        path, real_folder = (folder / name).resolve(), folder.resolve()
    except (OSError, ValueError, RuntimeError):
        raise Unreadable(f"{name!r} is no path") from None
    if path == real_folder or not path.is_relative_to(real_folder):
        raise Unreadable(f"{name!r} leads out of its folder")
    return path


_LOCK = ".lmbench-lock"


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder `lmbench-PURPOSE-...`, removed at the end of a `with` block or of the process.

    The process holds a lock in the folder, which the kernel releases however the process ends. Making the next scratch
    folder removes all folders whose lock is free.
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
        # The lock is taken before the file gets the name that other processes look for.
        new = Path(self.name, ".new")
        self._lock = new.open("x")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(new.with_name(_LOCK))
