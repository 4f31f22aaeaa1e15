"""Reading files that somebody else may have made: only regular files, never more than was allowed, no link out of the
folder that they belong to.

A result comes from a colleague, a cluster, a download. What looks like its run.json may be a pipe that never ends, a
link to a device or to another person's file, or four megabytes of gzip that unpack to eight gigabytes.
"""

from __future__ import annotations

import errno
import gzip
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_GZIP = b"\x1f\x8b"
_CHUNK_BYTES = 2**20

#: What a file is that is no regular one.
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class Unreadable(Exception):
    """A file that is not read, or not to its end; one line that says why and names no file: `it is a pipe, no file`.

    `is_missing` where there is none.
    """

    def __init__(self, why: str, is_missing: bool = False) -> None:
        super().__init__(why)
        self.is_missing = is_missing


def read_file(path: Path, most_bytes: int, follows_links: bool = False) -> bytes:
    """The content of a regular file of at most so many bytes.

    A file that the user named may be a link (`follows_links`); of a file found in a result folder a link is followed
    only to another file of the same folder.

    Raises:
        Unreadable: it is missing, no regular file, a link that leads out of its folder, larger, or may not be read.
    """
    with open_file(path, follows_links) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise _too_large(most_bytes)
        # It may grow meanwhile, and what lies in /proc says that it has 0 bytes.
        return Bounded(file, most_bytes).read_all()


def read_unpacked(path: Path, most_bytes: int, follows_links: bool = False) -> bytes:
    """The content of a file that is packed by gzip or plain, as its first bytes say; `most_bytes` is the limit of what
    comes out. Raises Unreadable, as `read_file` does, also for a gzip file that is damaged or ends early."""
    with open_unpacked(path, most_bytes, follows_links) as stream:
        return stream.read_all()


@contextmanager
def open_unpacked(path: Path, most_bytes: int, follows_links: bool = False) -> Iterator[Bounded]:
    """A stream of a file's content, unpacked where it is a gzip file; as `read_unpacked`, for what is read piece by
    piece. Reading from it raises Unreadable."""
    with open_file(path, follows_links) as file:
        is_packed = _reading(file.read, len(_GZIP)) == _GZIP
        file.seek(0)
        if not is_packed:
            yield Bounded(file, most_bytes)
            return
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield Bounded(unpacked, most_bytes)


class Bounded:
    """A binary stream that raises Unreadable instead of giving more than so many bytes."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile, most_bytes: int) -> None:
        self._stream = stream
        self._most_bytes = most_bytes
        self._left_bytes = most_bytes

    def read(self, size: int) -> bytes:
        return self._counted(self._stream.read, size)

    def readline(self, size: int) -> bytes:
        """The next line with its line feed, or so much of it."""
        return self._counted(self._stream.readline, size)

    def read_all(self) -> bytes:
        """What is left."""
        # In pieces: a buffer of the size that is allowed would be made at once.
        return b"".join(iter(lambda: self.read(_CHUNK_BYTES), b""))

    def _counted(self, read: Callable[[int], bytes], size: int) -> bytes:
        data = _reading(read, min(size, self._left_bytes + 1))
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise _too_large(self._most_bytes)
        return data


@contextmanager
def open_file(path: Path, follows_links: bool = False) -> Iterator[BinaryIO]:
    """A regular file for reading in binary. Raises Unreadable, as `read_file` does (but for its size)."""
    fd = _open(path, follows_links)
    with os.fdopen(fd, "rb") as file:
        yield file


def is_file(path: Path) -> bool:
    """Whether there is a regular file, or a link to one of the same folder: what `open_file` opens."""
    try:
        return stat.S_ISREG(_within(path).lstat().st_mode)
    except (OSError, ValueError, Unreadable):
        return False


def is_folder(path: Path) -> bool:
    """Whether there is a folder that is no link."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def inside(folder: Path, name: str) -> Path:
    """The path that a record gives of a file beside it. Raises Unreadable for one that is not below the folder, be it
    by `..`, as an absolute path or through links."""
    try:
        path, home = (folder / name).resolve(), folder.resolve()
    except (OSError, ValueError, RuntimeError):
        raise Unreadable(f"{name!r} is no path") from None
    if path == home or not path.is_relative_to(home):
        raise Unreadable(f"{name!r} is outside of its folder")
    return path


def _open(path: Path, follows_links: bool) -> int:
    # Without O_NONBLOCK a pipe that nobody writes to would be waited for for ever.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOCTTY", 0)
    try:
        fd = os.open(path, flags) if follows_links else os.open(_within(path), flags | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise Unreadable("it is missing", is_missing=True) from None
    except OSError as error:
        raise Unreadable(_why_not(error)) from None
    except ValueError:
        raise Unreadable("its name is no path") from None
    kind = os.fstat(fd).st_mode
    if not stat.S_ISREG(kind):
        os.close(fd)
        raise Unreadable(f"it is {next((name for test, name in _KINDS if test(kind)), 'something else')}, no file")
    return fd


def _within(path: Path) -> Path:
    """The path itself, or the target of a link in the same folder."""
    if not path.is_symlink():
        return path
    try:
        return inside(path.parent, path.name)
    except Unreadable:
        raise Unreadable("it is a link that leads out of its folder, and is not followed") from None


def _reading(read: Callable[[int], bytes], size: int) -> bytes:
    """What a stream's `read` or `readline` gives, its errors as Unreadable."""
    try:
        return read(size)
    except EOFError:
        raise Unreadable("the gzip file ends early") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise Unreadable(f"the gzip file is damaged: {error}") from None
    except OSError as error:
        raise Unreadable(_why_not(error)) from None


def _why_not(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "it is a link that leads nowhere"
    if error.errno == errno.ENXIO:
        return "it is a socket, no file"
    return f"it cannot be read: {error.strerror}"


def _too_large(most_bytes: int) -> Unreadable:
    return Unreadable(f"it holds more than {_in_words(most_bytes)}, which is the most that is read")


def _in_words(size_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes} bytes"
