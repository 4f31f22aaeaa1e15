"""From a path to a trace's events as columns, checked: what ran on the device, what launched it, what the host did.

Whatever is no trace, or a damaged one, is one line to the user.
"""

from __future__ import annotations

import gc
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from lmbench.errors import UsageError
from lmbench.kernels.recorded import NOTES, TRACE_FILE, TraceNotes
from lmbench.records.load import Run, is_run_folder, load_run
from lmbench.records.store import RUN_FILE

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
HOST_CATEGORIES = ("cpu_op", "user_annotation")
ANNOTATION = "user_annotation"
#: No correlation id, no sequence number, no thread: nothing that the profiler would write.
NONE = -1
# Microseconds since 1970, as older profilers write them, are about 2e15; in ns they still fit into 64 bits.
_MAX_US = 9e15
_LAUNCHING = re.compile(r"Launch\w*Kernel|GraphLaunch|Memcpy|Memset", re.IGNORECASE)

# Decoded, JSON takes about ten times its size in memory.
MAX_JSON_BYTES = 1 << 30
_CHUNK = 1 << 20
_RECORD_ONE = "record one with `lmbench fit ... --trainer.profiler kernels`"


@dataclass(frozen=True)
class Source:
    """A decoded trace, where it came from, and the run it belongs to (None for a bare trace file)."""

    path: Path
    events: list[Any]
    notes: TraceNotes
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
    try:
        notes = msgspec.convert(document.get(NOTES, {}), TraceNotes)
    except msgspec.ValidationError as error:
        _refuse(file, f"is damaged: its notes of lmbench: {str(error).replace('`', '')}; {_RECORD_ONE}")
    return Source(file, events, notes, run)


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


@dataclass(frozen=True)
class HostEvents:
    """Operators and ranges, by thread, then start, then the longer first: parents stand before their children."""

    names: list[str]
    is_range: Flags
    start_ns: Integers
    end_ns: Integers
    thread: Integers
    sequence: Integers
    forward_thread: Integers


@dataclass(frozen=True)
class Launches:
    """Calls into the CUDA runtime and driver that can start work on the device, by start."""

    names: list[str]
    start_ns: Integers
    end_ns: Integers
    thread: Integers
    correlation: Integers


@dataclass(frozen=True)
class DeviceEvents:
    """Kernels, copies and fills on the device, by start."""

    names: list[str]
    category: list[str]
    start_ns: Integers
    end_ns: Integers
    stream: Integers
    device: Integers
    correlation: Integers


@dataclass(frozen=True)
class Events:
    """A whole trace of one process and at most one device. `main_thread` is the one that the ranges are on."""

    host: HostEvents
    launches: Launches
    device: DeviceEvents
    main_thread: int

    @property
    def has_kernels(self) -> bool:
        return bool(self.device.names)


def read_events(source: Source) -> Events:
    """Sort a trace's events into columns, in ns.

    Raises UsageError for events of wrong types, for a trace without any event of torch.profiler's, and for one of
    several processes or devices.
    """
    wanted: dict[str, list[dict[str, Any]]] = {
        name: [] for name in (*DEVICE_CATEGORIES, *LAUNCH_CATEGORIES, *HOST_CATEGORIES)
    }
    for event in source.events:
        if not isinstance(event, dict):
            _refuse(
                source.path,
                f"is no trace: an event is {type(event).__name__}, not an object; give one that torch.profiler wrote",
            )
        if event.get("ph") == "X" and isinstance(category := event.get("cat"), str) and category in wanted:
            wanted[category].append(event)
    device = [event for name in DEVICE_CATEGORIES for event in wanted[name]]
    launches = [event for name in LAUNCH_CATEGORIES for event in wanted[name]]
    host = [event for name in HOST_CATEGORIES for event in wanted[name]]
    if not device and not host:
        _refuse(
            source.path,
            f"has no operators and no kernels among its {len(source.events)} events; give a trace that torch.profiler "
            "wrote",
        )
    _check(source.path, device, launches, host)
    # Times count from the first event: a 64-bit float cannot hold nanoseconds since 1970.
    base_us = min(event["ts"] for event in (*device, *launches, *host))
    threads: dict[Any, int] = {}
    host_events = _host(host, threads, base_us)
    return Events(
        host_events, _launches(launches, threads, base_us), _device(device, base_us), _main_thread(host_events)
    )


def _check(
    file: Path, device: list[dict[str, Any]], launches: list[dict[str, Any]], host: list[dict[str, Any]]
) -> None:
    """Refuse values of wrong types, and events of several processes or devices."""
    as_written = "give a trace as torch.profiler wrote it"
    for event in (*device, *launches, *host):
        name = event.get("name")
        if not isinstance(name, str):
            _refuse(file, f"is damaged: an event of category {event['cat']} has no name; {as_written}")
        if not isinstance(event.get("args", {}), dict):
            _refuse(file, f"is damaged: the args of event {name[:60]!r} are no object; {as_written}")
        for key in ("ts", "dur"):
            value: Any = event.get(key)
            if type(value) not in (int, float) or not 0 <= value <= _MAX_US:
                told = f"event {name[:60]!r} has {key} {str(value)[:40]!r}, not a time in us"
                _refuse(file, f"is damaged: {told}; {as_written}")
    processes = {str(event.get("pid")) for event in host or launches}
    devices = {str(event.get("args", {}).get("device", event.get("pid"))) for event in device}
    for found, what in ((processes, "processes"), (devices, "devices")):
        if len(found) > 1:
            holds = f"holds {'kernels of ' if what == 'devices' else ''}{len(found)} {what}"
            _refuse(file, f"{holds} ({', '.join(sorted(found)[:4])}); give the trace of one rank")


def _host(events: list[dict[str, Any]], threads: dict[Any, int], base_us: float) -> HostEvents:
    start, end = _times(events, base_us)
    thread = _threads(events, threads)
    order = np.lexsort((-end, start, thread))
    args = [event.get("args", {}) for event in events]
    return HostEvents(
        [events[index]["name"] for index in order],
        np.array([event["cat"] == ANNOTATION for event in events], dtype=np.bool_)[order],
        start[order],
        end[order],
        thread[order],
        _numbers(args, "Sequence number")[order],
        _numbers(args, "Fwd thread id")[order],
    )


def _launches(events: list[dict[str, Any]], threads: dict[Any, int], base_us: float) -> Launches:
    # Most runtime calls of a trace ask or wait for something, and start nothing.
    found: dict[str, bool] = {}
    kept = [event for event in events if found.setdefault(event["name"], bool(_LAUNCHING.search(event["name"])))]
    start, end = _times(kept, base_us)
    order = np.argsort(start, kind="stable")
    return Launches(
        [kept[index]["name"] for index in order],
        start[order],
        end[order],
        _threads(kept, threads)[order],
        _numbers([event.get("args", {}) for event in kept], "correlation")[order],
    )


def _device(events: list[dict[str, Any]], base_us: float) -> DeviceEvents:
    start, end = _times(events, base_us)
    order = np.argsort(start, kind="stable")
    args = [event.get("args", {}) for event in events]
    return DeviceEvents(
        [events[index]["name"] for index in order],
        [events[index]["cat"] for index in order],
        start[order],
        end[order],
        _numbers(args, "stream")[order],
        _numbers(args, "device")[order],
        _numbers(args, "correlation")[order],
    )


def _times(events: Sequence[dict[str, Any]], base_us: float) -> tuple[Integers, Integers]:
    """Starts and ends in ns from the base; a trace has microseconds with three decimals."""
    start_us = np.array([event["ts"] for event in events], dtype=np.float64) - base_us
    duration_us = np.array([event["dur"] for event in events], dtype=np.float64)
    start = np.rint(start_us * 1e3).astype(np.int64)
    return start, start + np.rint(duration_us * 1e3).astype(np.int64)


def _threads(events: Sequence[dict[str, Any]], known: dict[Any, int]) -> Integers:
    found = [known.setdefault(str(event.get("tid")), len(known)) for event in events]
    return np.array(found, dtype=np.int64)


def _numbers(args: Sequence[dict[str, Any]], key: str) -> Integers:
    """A column of whole numbers, NONE where an event has none."""
    values = [value if type(value := item.get(key)) is int and 0 <= value < 2**63 else NONE for item in args]
    return np.array(values, dtype=np.int64)


def _main_thread(host: HostEvents) -> int:
    """The thread with the most ranges, or else with the first operator."""
    if not host.names:
        return 0
    ranges = host.thread[host.is_range]
    if len(ranges):
        return int(np.bincount(ranges).argmax())
    return int(host.thread[host.start_ns.argmin()])
