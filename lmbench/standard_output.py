"""Standard output that holds the result and nothing else, whatever is printed beside it.

A module prints, a library logs, C code writes to file descriptor 1, a loader's worker process inherits it: all of that
goes to standard error while the result's own stream is kept apart.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

#: The stream of the result while standard output is redirected.
_kept: list[TextIO] = []


def write_what_can_be() -> None:
    """Let standard output and error write `?` for characters that their encoding (ASCII, Latin-1) lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")


def result_stream() -> TextIO:
    """The stream that a command writes its result to; None where the process has no standard output."""
    return _kept[-1] if _kept else sys.stdout


def write_result(text: str) -> None:
    """Write what the command was asked for, as it stands."""
    stream = result_stream()
    if stream is not None:
        stream.write(text)
        stream.flush()


def abandon_result() -> None:
    """Discard what is left of a result that nobody takes, which Python would otherwise write, and fail, at its end."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), result_stream().fileno())


@contextmanager
def result_alone(until_exit: bool = False) -> Iterator[None]:
    """Within, only `write_result` reaches standard output; the output of Python and C code goes to standard error.

    With `until_exit` the redirection stays: what threads, exit handlers and C's own buffers still print belongs to no
    result. Inside another such block this one changes nothing.
    """
    before = sys.stdout
    if _kept or before is None:
        yield
        return
    _flush(before)
    # A replaced sys.stdout (a notebook's, a test's) has no descriptor; only Python's output is redirected then.
    descriptor = None
    with suppress(OSError, ValueError, AttributeError):
        descriptor = os.dup(before.fileno())
        os.dup2(2, before.fileno())
    result = before
    if descriptor is not None:
        result = open(descriptor, "w", encoding=before.encoding, errors=before.errors)  # noqa: SIM115, PTH123
    _kept.append(result)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        if not until_exit:
            _kept.clear()
            _flush(before)
            if descriptor is not None:
                os.dup2(descriptor, before.fileno())
                result.close()
            sys.stdout = before


def _flush(stream: TextIO) -> None:
    """Flush a stream of Python's, and C's own buffers."""
    with suppress(OSError, AttributeError):
        stream.flush()
        ctypes.CDLL(None).fflush(None)
