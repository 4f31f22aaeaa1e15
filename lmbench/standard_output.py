"""Keeps standard output for a command's result alone.

A module may print, a library may log, C code may write to file descriptor 1, and a loader's worker process inherits it.
All of that is redirected to standard error, while the result has a stream of its own.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

#: Holds the stream of the result while standard output is redirected, else nothing.
_result_streams: list[TextIO] = []


def replace_unencodable() -> None:
    """Let standard output and error write `?` for characters that their encoding (ASCII, Latin-1) lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")


def result_stream() -> TextIO:
    """The stream for a command's result; None where the process has no standard output."""
    return _result_streams[-1] if _result_streams else sys.stdout


def write_result(text: str) -> None:
    """Write a part of the command's result, without adding a line end."""
    stream = result_stream()
    if stream is not None:
        stream.write(text)
        stream.flush()


def abandon_result() -> None:
    """Discard the unwritten rest of a result whose reader is gone; Python would fail to write it at exit."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), result_stream().fileno())


@contextmanager
def result_alone(until_exit: bool = False) -> Iterator[None]:
    """Let only `write_result` reach standard output; other output of Python and C code goes to standard error.

    A nested block changes nothing.

    Args:
        until_exit: keep the redirection after the block, also for threads, exit handlers and C's buffers.
    """
    before = sys.stdout
    if _result_streams or before is None:
        yield
        return
    _flush(before)
    # A replaced sys.stdout (a notebook's, a test's) has no descriptor; then only Python's output is redirected.
    descriptor = None
    with suppress(OSError, ValueError, AttributeError):
        descriptor = os.dup(before.fileno())
        os.dup2(2, before.fileno())
    result = before
    if descriptor is not None:
        result = open(descriptor, "w", encoding=before.encoding, errors=before.errors)  # noqa: SIM115, PTH123
    _result_streams.append(result)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        if not until_exit:
            _result_streams.clear()
            _flush(before)
            if descriptor is not None:
                os.dup2(descriptor, before.fileno())
                result.close()
            sys.stdout = before


def _flush(stream: TextIO) -> None:
    """Flush a Python stream, and C's buffers."""
    with suppress(OSError, AttributeError):
        stream.flush()
        ctypes.CDLL(None).fflush(None)
