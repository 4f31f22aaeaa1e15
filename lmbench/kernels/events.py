"""A trace of torch.profiler, read as columns: what ran on the device, what launched it, what the host did.

Read are recordings of torch 2.x on CUDA and ROCm. A trace is a file that somebody else may have made: its size is
limited, and what is no such trace is one line to the user.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct, field

from lmbench.errors import UsageError
from lmbench.files import Unreadable, read_unpacked
from lmbench.kernels.recorded import NOTES, TRACE_FILE, TraceNotes
from lmbench.records.intervals import NONE, Flags, Integers, locate, union
from lmbench.records.load import Run, is_run_folder, load_run
from lmbench.records.store import RUN_FILE

Words = npt.NDArray[np.object_]

#: The most that a trace may hold, unpacked: its events take about twice as much memory.
MAX_JSON_BYTES = 1 << 30
_RECORD = "record one with `lmbench fit ... --trainer.profiler kernels`"

#: Categories of events that are read; a column has the place here. The first three run on the device.
CATEGORIES = (
    "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver", "cpu_op", "user_annotation",
    "gpu_user_annotation",
)  # fmt: skip
_CODES = {category: code for code, category in enumerate(CATEGORIES)}
_KERNELS, _CALLS, _HOST = (0, 1, 2), (3, 4), (5, 6)
_ANNOTATION, _DRAWN = 6, 7
#: Categories of devices, and of profilers before torch 2.0, that are not read.
_UNREAD = re.compile(r"xpu_|privateuse1_|mtia_|hpu_|async_npu$|Kernel$|Runtime$|Operator$")

_LAUNCHING = re.compile(r"Launch\w*Kernel|KernelLaunch|GraphLaunch|Memcpy|Memset", re.IGNORECASE)
# Calls that return when the device is done. `StreamWaitEvent` makes a stream wait, and not the host.
_STOPPING = re.compile(r"Synchronize|EventWait$|QueueFinish", re.IGNORECASE)
_CAPTURE = re.compile(r"Stream(Begin|End)Capture")
# Microseconds since 1970 are about 2e15; in ns they still fit into 64 bits.
_MAX_US = 9e15


_Number = Annotated[int, Meta(ge=-(2**62), le=2**62)]


class _Arguments(Struct, frozen=True, gc=False):
    correlation: _Number = NONE
    external: _Number = field(default=NONE, name="External id")
    device: _Number = 0
    stream: _Number = NONE
    sequence: _Number = field(default=NONE, name="Sequence number")
    forward_thread: _Number = field(default=NONE, name="Fwd thread id")


class _Event(Struct, gc=False):
    """What is used of an event, as it stands in the file: times in us, a number or a number as text."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = float("nan")
    dur: float | None = None
    args: _Arguments = _Arguments()


class _Document(Struct):
    traceEvents: list[_Event]
    notes: TraceNotes = field(name=NOTES, default_factory=TraceNotes)


# Chrome's other form is a list of events alone.
_decoder = msgspec.json.Decoder(_Document | list[_Event], strict=False)


@dataclass(frozen=True)
class Events:
    """Events as columns of one length, times in ns from the first event. Missing numbers are NONE."""

    names: Words
    category: Integers
    start_ns: Integers
    end_ns: Integers
    thread: Integers
    device: Integers
    stream: Integers
    correlation: Integers
    external: Integers
    sequence: Integers
    forward_thread: Integers

    def __len__(self) -> int:
        return len(self.names)

    def take(self, rows: npt.NDArray[Any]) -> Events:
        """The events of these rows, by their indices or by flags."""
        return Events(*(getattr(self, column.name)[rows] for column in fields(self)))

    @property
    def is_range(self) -> Flags:
        """Which events are annotations, and no operators."""
        return np.isin(self.category, (_ANNOTATION, _DRAWN))

    def where(self, test: Callable[[str], object]) -> Flags:
        """The events whose names pass a test, which is made once for each name."""
        return where(self.names, test)


def where(words: Words, test: Callable[[str], object]) -> Flags:
    """Which of the words pass a test, which is made once for each."""
    passed = {word: bool(test(word)) for word in set(words)}
    return np.fromiter(map(passed.__getitem__, words), np.bool_, len(words))


@dataclass(frozen=True)
class TraceEvents:
    """A whole trace of one process.

    `host` are operators and ranges, by thread, then start, then the longer first: parents stand before their children.
    `launches` are calls that can start work on the device, `is_captured` those of them that start nothing, as a stream
    was captured into a graph meanwhile; `stops` are calls in which the host waits until the device is done
    (`cudaStreamSynchronize` ...); `kernels` are kernels, copies and fills; these three are by start. `drawn` are the
    user's annotations as the profiler drew them on the device, in the order of `host` with streams for threads.
    `main_thread` is the one with most ranges; `begun_us` is the file's time of the first event, `unfinished` the number
    of events without a duration, which are left out.
    """

    host: Events
    launches: Events
    is_captured: Flags
    stops: Events
    kernels: Events
    drawn: Events
    main_thread: int
    begun_us: float
    unfinished: int


def find_trace(path: str | Path) -> tuple[Path, Run | None]:
    """The trace's file (`.json` or `.json.gz`) that is named, or the one in a run's folder; and its run, if any.

    Raises UsageError, in one line, for what is no such path.
    """
    file = Path(path)
    try:
        if file.name == RUN_FILE and file.is_file():
            file = file.parent
        if file.is_dir():
            if not is_run_folder(file):
                raise UsageError(f"{str(path)!r} is no lmbench result; give a run's folder or a trace file")
            file /= TRACE_FILE
            if not file.is_file():
                raise UsageError(f"{str(path)!r} has no {TRACE_FILE}; {_RECORD}")
        elif not file.is_file():
            reason = "is a pipe or a device; write the trace to a file" if file.exists() else "does not exist"
            raise UsageError(f"{str(path)!r} {reason}; give a run's folder or a trace file")
        is_result = file.name == TRACE_FILE and is_run_folder(file.parent)
    except (OSError, ValueError) as error:
        reason = (error.strerror or "") if isinstance(error, OSError) else "it is no path"
        raise UsageError(f"{str(path)[:200]!r} cannot be read: {reason}; give a run's folder or a trace") from error
    return file, load_run(file.parent) if is_result else None


def read_trace(path: Path, is_result: bool = False) -> tuple[TraceEvents, TraceNotes]:
    """A trace's events, and what lmbench noted beside them.

    A link that the user names may lead anywhere, one in a result (`is_result`) not. Raises UsageError, in one line, for
    a file that is missing, no regular one, too large, truncated or no trace, for events of wrong types, for devices
    that are not read and for a trace of several processes.
    """
    try:
        document = _decoder.decode(read_unpacked(path, MAX_JSON_BYTES, follows_links=not is_result))
    except Unreadable as error:
        advice = "record fewer steps" if "more than" in str(error) else _RECORD
        _refuse(path, f"cannot be read: {error}; {advice}")
    except RecursionError:
        _refuse(path, "is no trace: nested too deeply; give one that torch.profiler wrote")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = str(error).replace("`", "")
        _refuse(path, f"is no trace, or a damaged one: {reason}; give one as torch.profiler wrote it")
    if isinstance(document, list):
        document = _Document(document)
    return _sorted(path, document.traceEvents), document.notes


def _refuse(path: Path, reason: str) -> NoReturn:
    raise UsageError(f"{str(path)[:200]!r} {reason}")


def _sorted(path: Path, events: list[_Event]) -> TraceEvents:
    if unread := sorted({event.cat for event in events if _UNREAD.match(event.cat)}):
        _refuse(path, f"has events of {', '.join(unread)}, which are not read; give one of torch 2 on CUDA or ROCm")
    whole = [event for event in events if event.ph == "X" and event.cat in _CODES]
    kept = [event for event in whole if event.dur is not None and event.dur >= 0]

    def column(name: str, dtype: type = np.int64) -> npt.NDArray[Any]:
        return np.fromiter(map(attrgetter(name), kept), dtype, len(kept))

    category = np.fromiter((_CODES[event.cat] for event in kept), np.int64, len(kept))
    if np.isin(category, _CALLS).all():
        _refuse(path, f"has no operators and no kernels among its {len(events)} events; {_RECORD}")
    is_on_host = np.isin(category, _CALLS + _HOST)
    processes = set(map(str, column("pid", object)[is_on_host]))
    if len(processes) > 1:
        _refuse(path, f"holds {len(processes)} processes ({', '.join(sorted(processes)[:4])}); give that of one rank")
    start_us, duration_us = column("ts", float), column("dur", float)
    if not (np.abs((start_us, duration_us)) <= _MAX_US).all():
        _refuse(path, "is damaged: an event's ts or dur is no time in us; give one as torch.profiler wrote it")
    # Times count from the first event: a 64-bit float cannot hold nanoseconds since 1970.
    begun_us = float(start_us.min())
    start_ns = np.rint((start_us - begun_us) * 1e3).astype(np.int64)
    threads: dict[str, int] = {}
    thread = [threads.setdefault(str(tid), len(threads)) for tid in column("tid", object)]
    columns = Events(
        column("name", object),
        category,
        start_ns,
        start_ns + np.rint(duration_us * 1e3).astype(np.int64),
        np.array(thread),
        *(
            column(f"args.{name}")
            for name in ("device", "stream", "correlation", "external", "sequence", "forward_thread")
        ),
    )
    return _divided(columns, begun_us, len(whole) - len(kept))


def _divided(events: Events, begun_us: float, unfinished: int) -> TraceEvents:
    """The columns of all events, by what they are."""

    def by_start(rows: Flags) -> Events:
        part = events.take(rows)
        return part.take(np.argsort(part.start_ns, kind="stable"))

    def nested(rows: Flags, place: str) -> Events:
        part = events.take(rows)
        return part.take(np.lexsort((-part.end_ns, part.start_ns, getattr(part, place))))

    host = nested(np.isin(events.category, _HOST), "thread")
    is_call = np.isin(events.category, _CALLS)
    launches = by_start(is_call & events.where(_LAUNCHING.search))
    calls = by_start(is_call & events.where(_CAPTURE.search))
    ranges = host.thread[host.is_range]
    main_thread = np.bincount(ranges if len(ranges) else host.thread[:1]).argmax() if len(host) else 0
    return TraceEvents(
        host,
        launches,
        locate(*_captures(calls, int(events.end_ns.max())), launches.start_ns) != NONE,
        by_start(is_call & events.where(_STOPPING.search)),
        by_start(np.isin(events.category, _KERNELS)),
        nested(events.category == _DRAWN, "stream"),
        int(main_thread),
        begun_us,
        unfinished,
    )


def _captures(calls: Events, last_ns: int) -> tuple[Integers, Integers]:
    """When a stream was captured: from a call that begins it to the next on its thread that ends it, or to the last
    moment of the trace, where the profiler stopped in a capture."""
    is_begin = calls.where(lambda name: "Begin" in name)
    start, end = [], []
    for index in np.flatnonzero(is_begin):
        is_end = ~is_begin & (calls.thread == calls.thread[index]) & (calls.start_ns > calls.start_ns[index])
        start.append(calls.start_ns[index])
        end.append(calls.end_ns[is_end].min(initial=last_ns) + 1)
    return union(np.array(start, dtype=np.int64), np.array(end, dtype=np.int64))
