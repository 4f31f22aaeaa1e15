"""A trace's events as columns, checked: what ran on the device, what launched it, what the host did.

Profilers of different ages and devices write the same things under different names; here they get one.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lmbench.kernels.trace.document import Arguments, Event, TraceDocument

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_KERNEL, _COPY, _FILL = "kernel", "gpu_memcpy", "gpu_memset"
_OPERATOR, _ANNOTATION = "cpu_op", "user_annotation"
_CALL = "cuda_runtime"
_DEVICE_ANNOTATION = "gpu_user_annotation"
#: Categories by those that a trace has. Kineto of torch 1.8 to 1.11 writes `Kernel`, `Memcpy`, `Runtime`, `Operator`
#: (1.10 and 1.11 only some of them); Intel's GPUs and PyTorch's out-of-tree devices have names of their own for calls.
_CATEGORIES = {
    _KERNEL: _KERNEL, _COPY: _COPY, _FILL: _FILL, "Kernel": _KERNEL, "Memcpy": _COPY, "Memset": _FILL,
    _OPERATOR: _OPERATOR, _ANNOTATION: _ANNOTATION, "Operator": _OPERATOR, _DEVICE_ANNOTATION: _DEVICE_ANNOTATION,
    **dict.fromkeys(
        ("cuda_runtime", "cuda_driver", "Runtime", "xpu_runtime", "xpu_driver", "privateuse1_runtime",
         "privateuse1_driver"), _CALL
    ),
}  # fmt: skip
_ASCEND = "an Ascend NPU"
#: Where the device's work stands whose events are no kernels, copies and fills.
_UNREAD_DEVICES = {
    "mtia_ccp_events": "an MTIA device",
    "mtia_insight": "an MTIA device",
    "hpu_op": "a Gaudi device (HPU)",
    "async_npu": _ASCEND,
}
# Ranges that PyTorch itself makes; torch 1.8 and 1.9 write them among the operators.
_RANGE_NAME = re.compile(r"^(ProfilerStep|enumerate\(DataLoader\)|Optimizer\.\w+)#")
#: No correlation id, no sequence number, no thread: nothing that the profiler would write.
NONE = -1
# Microseconds since 1970, as older profilers write them, are about 2e15; in ns they still fit into 64 bits.
_MAX_US = 9e15
_LAUNCHING = re.compile(r"Launch\w*Kernel|KernelLaunch|GraphLaunch|Memcpy|Memset", re.IGNORECASE)
# Calls that return when the device is done. `StreamWaitEvent` makes a stream wait, and not the host.
_STOPPING = re.compile(r"Synchronize|EventWait$|QueueFinish", re.IGNORECASE)
_BEGIN_CAPTURE, _END_CAPTURE = "StreamBeginCapture", "StreamEndCapture"
#: The most events of a trace, and of them the most operators, calls and kernels, which are kept.
MAX_EVENTS, MAX_KEPT_EVENTS = 20_000_000, 5_000_000
# Numbers of devices have fewer.
_DIGITS = 10
_AS_WRITTEN = "give a trace as torch.profiler wrote it"


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
    """Calls into the device's runtime and driver that can start work on it, by start.

    `external` is the number of the operator around it, NONE where the trace has none; `is_captured` while a stream was
    captured into a graph: such a call starts nothing.
    """

    names: list[str]
    start_ns: Integers
    end_ns: Integers
    thread: Integers
    correlation: Integers
    external: Integers
    is_captured: Flags


@dataclass(frozen=True)
class Stops:
    """Calls in which a thread of the host waits until the device is done (`cudaStreamSynchronize` ...), by start."""

    start_ns: Integers
    end_ns: Integers
    thread: Integers


@dataclass(frozen=True)
class DeviceEvents:
    """Kernels, copies and fills on the device, by start. `device` is its number in the trace, else it counts."""

    names: list[str]
    category: list[str]
    start_ns: Integers
    end_ns: Integers
    stream: Integers
    device: Integers
    correlation: Integers
    external: Integers


@dataclass(frozen=True)
class DeviceRanges:
    """The user's annotations as the profiler drew them on the device, by stream, then start, then the longer first."""

    names: list[str]
    start_ns: Integers
    end_ns: Integers
    stream: Integers


@dataclass(frozen=True)
class Events:
    """A whole trace of one process.

    Times count from `begun_us`, the file's time of the first event. `main_thread` is the one that the ranges are on.
    `unread` counts events of devices that are not read, by device; `unfinished` is the number of events without a
    duration, which are left out.
    """

    host: HostEvents
    launches: Launches
    stops: Stops
    device: DeviceEvents
    device_ranges: DeviceRanges
    main_thread: int
    begun_us: float
    unread: Counter[str]
    unfinished: int

    @property
    def has_kernels(self) -> bool:
        return bool(self.device.names)


def read_events(document: TraceDocument) -> Events:
    """Sort a trace's events into columns, in ns; the document's notes are there when this returns.

    Raises UsageError for a file that is no trace or a damaged one, for events of wrong types, for a trace without any
    event of torch.profiler's, and for one of several processes.
    """
    reader = _Reader(document)
    reader.read()
    return reader.events()


class _Columns:
    """Columns that grow by the events of one kind: in `ids` are `width` numbers of each."""

    def __init__(self, width: int) -> None:
        self.names: list[str] = []
        self.categories: list[str] = []
        self.start_us = array("d")
        self.duration_us = array("d")
        self.places = array("q")
        self._ids = array("q")
        self._width = width

    def __len__(self) -> int:
        return len(self.names)

    def add(self, name: str, category: str, start_us: float, duration_us: float, place: int, *ids: int) -> None:
        self.names.append(name)
        self.categories.append(category)
        self.start_us.append(start_us)
        self.duration_us.append(duration_us)
        self.places.append(place)
        self._ids.extend(ids)

    def times(self, begun_us: float) -> tuple[Integers, Integers]:
        """Starts and ends in ns; a trace has microseconds with three decimals."""
        # Times count from the first event: a 64-bit float cannot hold nanoseconds since 1970.
        start = np.rint((np.array(self.start_us) - begun_us) * 1e3).astype(np.int64)
        return start, start + np.rint(np.array(self.duration_us) * 1e3).astype(np.int64)

    def place(self) -> Integers:
        return np.array(self.places, dtype=np.int64)

    def ids(self) -> Integers:
        """A row for each of the `width` numbers."""
        return np.array(self._ids, dtype=np.int64).reshape(-1, self._width).T


class _Reader:
    """Sorts events into columns, one after the other."""

    def __init__(self, document: TraceDocument) -> None:
        self._document = document
        # Of a kernel its stream, correlation id and operator; of a call the last two; of the host's events whether it
        # is a range, its sequence number and its forward thread.
        self._device, self._calls, self._host = _Columns(3), _Columns(2), _Columns(3)
        self._device_ranges = _Columns(0)
        self._unread: Counter[str] = Counter()
        self._events = self._unfinished = self._pairs = 0
        # What stands for a thread, a process, a device in the file, in order; a name is in memory once.
        self._threads: dict[str, int] = {}
        self._processes: dict[str, int] = {}
        self._devices: dict[str, int] = {}
        self._names: dict[str, str] = {}

    def read(self) -> None:
        for piece in self._document.events():
            for event in piece:
                category = _CATEGORIES.get(event.cat) if type(event.cat) is str else None
                if category is None:
                    self._pass_over(event)
                elif event.ph == "X":
                    self._keep(event, category)
                elif event.ph == "B":
                    self._pairs += 1
            self._events += len(piece)
            kept = sum(map(len, (self._device, self._calls, self._host, self._device_ranges)))
            for count, most, what in (
                (self._events, MAX_EVENTS, "events"),
                (kept, MAX_KEPT_EVENTS, "operators, calls and kernels"),
            ):
                if count > most:
                    self._document.refuse(f"has more than {most:,} {what}, too much to read; record fewer steps")

    def _pass_over(self, event: Event) -> None:
        if event.ph == "X" and type(event.cat) is str and (device := _UNREAD_DEVICES.get(event.cat)):
            self._unread[device] += 1
        elif event.ph == "X" and event.cat is None and event.args.task_type is not None:
            self._unread[_ASCEND] += 1

    def _keep(self, event: Event, category: str) -> None:
        name, args = event.name, event.args
        if type(name) is not str:
            self._document.refuse(f"is damaged: an event of category {event.cat} has no name; {_AS_WRITTEN}")
        duration_us = self._time_us(event, "dur") if event.dur is not None else -1.0
        if duration_us < 0:
            # The profiler stopped while it ran.
            self._unfinished += 1
            return
        name, start_us = self._names.setdefault(name, name), self._time_us(event, "ts")
        if category in (_KERNEL, _COPY, _FILL):
            device = str(event.pid if args.device is None else args.device)
            number = int(device) if device.isdecimal() and len(device) < _DIGITS else len(self._devices)
            place = self._devices.setdefault(device, number)
            ids = (_whole(args.stream), _whole(args.correlation), _external(args))
            self._device.add(name, category, start_us, duration_us, place, *ids)
            return
        if category == _DEVICE_ANNOTATION:
            self._device_ranges.add(name, category, start_us, duration_us, _whole(args.stream))
            return
        self._processes.setdefault(str(event.pid), len(self._processes))
        thread = self._threads.setdefault(str(event.tid), len(self._threads))
        if category == _CALL:
            self._calls.add(name, category, start_us, duration_us, thread, _whole(args.correlation), _external(args))
            return
        is_range = category == _ANNOTATION or _RANGE_NAME.match(name) is not None
        numbers = (int(is_range), _whole(args.sequence), _whole(args.forward_thread))
        self._host.add(name, category, start_us, duration_us, thread, *numbers)

    def _time_us(self, event: Event, key: str) -> float:
        """A time of an event; some profilers write numbers as text."""
        value = number = getattr(event, key)
        if type(value) is str:
            try:
                number = float(value)
            except ValueError:
                number = None
        if type(number) not in (int, float) or not -_MAX_US <= number <= _MAX_US:
            told = f"event {event.name[:60]!r} has {key} {str(value)[:40]!r}, not a time in us"
            self._document.refuse(f"is damaged: {told}; {_AS_WRITTEN}")
        return float(number)

    def events(self) -> Events:
        self._check()
        begun_us = min(min(one.start_us) for one in (self._device, self._calls, self._host) if len(one))
        device, host = self._device_events(begun_us), self._host_events(begun_us)
        return Events(
            host, self._launches(begun_us, device), self._stops(begun_us), device, self._ranges(begun_us),
            _main_thread(host), begun_us, self._unread, self._unfinished,
        )  # fmt: skip

    def _check(self) -> None:
        """Refuse a trace with nothing to read, and one of several processes."""
        if not len(self._device) and not len(self._host):
            has_none = f"has no operators and no kernels among its {self._events} events"
            if self._pairs:
                has_none += f", and {self._pairs} that are written as beginning and end (B, E), which are not read"
            self._document.refuse(f"{has_none}; give a trace that torch.profiler wrote")
        if len(self._processes) > 1:
            holds = f"holds {len(self._processes)} processes ({', '.join(sorted(self._processes)[:4])})"
            self._document.refuse(f"{holds}; give the trace of one rank")

    def _device_events(self, begun_us: float) -> DeviceEvents:
        start, end = self._device.times(begun_us)
        order = np.argsort(start, kind="stable")
        stream, correlation, external = self._device.ids()[:, order]
        names, categories = self._device.names, self._device.categories
        return DeviceEvents(
            [names[index] for index in order], [categories[index] for index in order], start[order], end[order],
            stream, self._device.place()[order], correlation, external,
        )  # fmt: skip

    def _host_events(self, begun_us: float) -> HostEvents:
        start, end = self._host.times(begun_us)
        thread = self._host.place()
        order = np.lexsort((-end, start, thread))
        is_range, sequence, forward_thread = self._host.ids()[:, order]
        names = [self._host.names[index] for index in order]
        return HostEvents(
            names, is_range.astype(np.bool_), start[order], end[order], thread[order], sequence, forward_thread
        )

    def _ranges(self, begun_us: float) -> DeviceRanges:
        start, end = self._device_ranges.times(begun_us)
        stream = self._device_ranges.place()
        order = np.lexsort((-end, start, stream))
        return DeviceRanges(
            [self._device_ranges.names[index] for index in order], start[order], end[order], stream[order]
        )

    def _launches(self, begun_us: float, device: DeviceEvents) -> Launches:
        """Of the calls those that can start something, or did: most of a trace ask or wait for something."""
        names = self._calls.names
        start, end = self._calls.times(begun_us)
        thread = self._calls.place()
        correlation, external = self._calls.ids()
        of_name = {name: _LAUNCHING.search(name) is not None for name in set(names)}
        is_launching = np.array([of_name[name] for name in names], dtype=np.bool_)
        # A call under a name that is not known here has launched what carries its id, if no other call has that id.
        is_linked = np.isin(correlation, device.correlation[device.correlation != NONE])
        is_linked &= ~np.isin(correlation, correlation[is_launching])
        kept = np.flatnonzero(is_launching | is_linked)
        kept = kept[np.argsort(start[kept], kind="stable")]
        captures = _captures(names, start, end, thread)
        return Launches(
            [names[index] for index in kept], start[kept], end[kept], thread[kept], correlation[kept], external[kept],
            _within(captures, start[kept]),
        )  # fmt: skip

    def _stops(self, begun_us: float) -> Stops:
        start, end = self._calls.times(begun_us)
        thread = self._calls.place()
        of_name = {name: _STOPPING.search(name) is not None for name in set(self._calls.names)}
        kept = np.flatnonzero(np.array([of_name[name] for name in self._calls.names], dtype=np.bool_))
        kept = kept[np.argsort(start[kept], kind="stable")]
        return Stops(start[kept], end[kept], thread[kept])


def _whole(value: Any) -> int:
    """A whole number, some of them written as text; NONE for all else."""
    if type(value) is int:
        return value if 0 <= value < 2**63 else NONE
    return int(value) if type(value) is str and len(value) < 19 and value.isdecimal() else NONE


def _external(args: Arguments) -> int:
    return _whole(args.external_id if args.external_id is not None else args.old_external_id)


def _captures(names: list[str], start: Integers, end: Integers, thread: Integers) -> list[tuple[int, int]]:
    """When a stream was captured: from a call that begins it to the next on its thread that ends it."""
    calls = sorted(
        (int(start[index]), int(end[index]), int(thread[index]), _BEGIN_CAPTURE in name)
        for index, name in enumerate(names)
        if _BEGIN_CAPTURE in name or _END_CAPTURE in name
    )
    found: list[tuple[int, int]] = []
    begun: dict[int, int] = {}
    for at, done, own, is_begin in calls:
        if is_begin:
            begun.setdefault(own, at)
        elif own in begun:
            found.append((begun.pop(own), done))
    # The profiler stopped in a capture.
    last = int(end.max(initial=0))
    return found + [(at, last) for at in begun.values()]


def _within(spans: list[tuple[int, int]], moments: Integers) -> Flags:
    found = np.zeros(len(moments), dtype=np.bool_)
    for start, end in spans:
        found[np.searchsorted(moments, start) : np.searchsorted(moments, end, side="right")] = True
    return found


def _main_thread(host: HostEvents) -> int:
    """The thread with the most ranges, or else with the first operator."""
    if not host.names:
        return 0
    ranges = host.thread[host.is_range]
    if len(ranges):
        return int(np.bincount(ranges).argmax())
    return int(host.thread[host.start_ns.argmin()])
