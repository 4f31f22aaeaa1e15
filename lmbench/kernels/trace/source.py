"""From a path to a trace as it was written: found, unpacked, decoded; anything else is one line to the user."""

from __future__ import annotations

import gc
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lmbench.errors import UsageError
from lmbench.kernels.trace.recorded import TRACE_FILE
from lmbench.records.load import Run, is_run_folder, load_run
from lmbench.records.store import RUN_FILE

# Decoded, JSON takes about ten times its size in memory.
MAX_JSON_BYTES = 1 << 30
_CHUNK = 1 << 20
_RECORD_ONE = "record one with `lmbench fit ... --trainer.profiler kernels`"


@dataclass(frozen=True)
class Source:
    """A decoded trace, where it came from, and the run it belongs to (None for a bare trace file)."""

    path: Path
    events: list[Any]
    metadata: dict[str, Any]
    run: Run | None


def read_source(path: str | Path) -> Source:
    """Read a trace file (`.json` or `.json.gz`) or the one in a run's folder.

    Raises UsageError, in one line, for what is missing, empty, truncated, too large or no trace.
    """
    try:
        file = _find(Path(path), str(path))
    except OSError as error:
        raise UsageError(
            f"{str(path)[:200]!r} cannot be read: {error.strerror}; give a run's folder or a trace"
        ) from error
    document = _decode(_unpack(file), file)
    run = load_run(file.parent) if file.name == TRACE_FILE and is_run_folder(file.parent) else None
    if isinstance(document, list):
        # Chrome's other form: the events alone.
        document = {"traceEvents": document}
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        _refuse(file, "is no trace: it has no list `traceEvents`; give one that torch.profiler wrote")
    if not events:
        _refuse(file, f"is an empty trace: it has no events; {_RECORD_ONE}")
    metadata = document.get("lmbench", {})
    return Source(file, events, metadata if isinstance(metadata, dict) else {}, run)


def _find(given: Path, path: str) -> Path:
    """The trace's file. Raises UsageError, and OSError for a place that may not be looked into."""
    if given.name == RUN_FILE and given.is_file():
        given = given.parent
    if given.is_dir():
        if not is_run_folder(given):
            raise UsageError(f"{path!r} is no lmbench result; give a run's folder or a trace file")
        file = given / TRACE_FILE
        if not file.is_file():
            raise UsageError(f"{path!r} has no {TRACE_FILE}; {_RECORD_ONE}")
        return file
    if given.is_file():
        return given
    if given.exists():
        raise UsageError(f"{path!r} is a pipe or a device; write the trace to a file and give that")
    raise UsageError(f"{path!r} does not exist; give a run's folder or a trace file")


def _unpack(file: Path) -> bytes:
    """The file's text, unzipped whatever its name, up to the limit."""
    chunks, size = [], 0
    try:
        with file.open("rb") as plain:
            is_packed = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            stream = gzip.GzipFile(fileobj=plain) if is_packed else plain
            while chunk := stream.read(_CHUNK):
                chunks.append(chunk)
                size += len(chunk)
                if size > MAX_JSON_BYTES:
                    limit = f"{MAX_JSON_BYTES / 2**30:g} GiB"
                    _refuse(file, f"holds more than {limit} of text, too much to read; record fewer steps")
    except EOFError:
        _refuse(file, f"is truncated: the gzip file ends early; {_RECORD_ONE}")
    except (gzip.BadGzipFile, zlib.error) as error:
        _refuse(file, f"is damaged: {error}; {_RECORD_ONE}")
    except OSError as error:
        _refuse(file, f"cannot be read: {error.strerror}; check the file and its permissions")
    text = b"".join(chunks)
    if not text or text.isspace():
        _refuse(file, f"is empty; {_RECORD_ONE}")
    return text


def _decode(text: bytes, file: Path) -> Any:
    try:
        with _no_collection():
            return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        # What was cut off fails at its very end, what was never JSON before it.
        if 0 < error.pos >= len(error.doc.rstrip()) - 1 or "Unterminated" in error.msg:
            _refuse(file, f"is truncated: its JSON ends early, at character {error.pos}; {_RECORD_ONE}")
        _refuse(file, f"is no trace: not JSON ({error.msg}, line {error.lineno}); give one that torch.profiler wrote")
    except RecursionError:
        _refuse(file, "is no trace: nested too deeply; give one that torch.profiler wrote")
    except ValueError as error:
        _refuse(file, f"is no trace: {str(error).partition(';')[0]}; give one that torch.profiler wrote")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage collection off: while millions of objects are made it would look at all of them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse(file: Path, reason: str) -> NoReturn:
    raise UsageError(f"{str(file)!r} {reason}")
