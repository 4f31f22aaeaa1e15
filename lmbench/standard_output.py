"""Standard output that holds the result and nothing else, whatever is printed beside it.

A module prints, a library logs, C code writes to file descriptor 1, a loader's worker process inherits it: all of that
goes to standard error while the result's own stream is kept apart.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_kept: list[TextIO] = []


#: What stands for a character that a terminal's encoding lacks; `?` for others.
_PLAIN = {"±": "+-", "≤": "<=", "≥": ">=", "→": "->", "×": "x", "─": "-", "µ": "u", "°": "deg ", "–": "-", "…": "..."}


def write_what_can_be() -> None:
    """Let standard output and error write something for what their encoding (ASCII, Latin-1) lacks."""
    codecs.register_error("lmbench.plain", _plainly)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="lmbench.plain")


def _plainly(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(each, "?") for each in error.object[error.start : error.end]), error.end


def result_stream() -> TextIO:
    """Where a command writes what it was asked for; standard output, unless that is kept apart."""
    return _kept[-1] if _kept else sys.stdout


def write_result(text: str) -> None:
    """Write what the command was asked for, as it stands."""
    stream = result_stream()
    # None where the process was started without a standard output.
    if stream is not None:
        stream.write(text)
        stream.flush()


def abandon_result() -> None:
    """Nobody takes the result: what is left of it would be tried again, and complained about, when Python ends."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), result_stream().fileno())


@contextmanager
def result_alone(until_exit: bool = False) -> Iterator[None]:
    """Within, only `write_result` reaches standard output; all else goes to standard error.

    With `until_exit` that stays so: what threads, exit handlers and C's own buffers still say belongs to no result.
    Inside another such block this one changes nothing.
    """
    if _kept or sys.stdout is None:
        yield
        return
    before = sys.stdout
    before.flush()
    _flush_c()
    saved = _standard_fd(before)
    stream = before
    if saved is not None:
        stream = open(saved, "w", encoding=before.encoding, errors=before.errors, closefd=False)  # noqa: SIM115
        _point_at_standard_error()
        if hasattr(before, "reconfigure"):
            # As it comes, between the lines that are standard error's own.
            before.reconfigure(line_buffering=True)
    elif sys.stderr is not None:
        sys.stdout = sys.stderr
    _kept.append(stream)
    try:
        yield
    finally:
        if not until_exit:
            _kept.clear()
            if saved is not None:
                with suppress(OSError):
                    before.flush()
                _flush_c()
                os.dup2(saved, 1)
                os.close(saved)
            sys.stdout = before


def _standard_fd(stream: TextIO) -> int | None:
    """A copy of file descriptor 1 where the stream writes to it; None where Python's stream has been replaced."""
    try:
        return os.dup(1) if stream.fileno() == 1 else None
    except (OSError, ValueError, AttributeError):
        return None


def _point_at_standard_error() -> None:
    try:
        os.dup2(2, 1)
    except OSError:
        # There is none.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


def _flush_c() -> None:
    """C's streams have buffers of their own."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)
