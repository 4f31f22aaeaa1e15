"""The events of a trace as columns, checked: what ran on the device, what launched it, what the host did meanwhile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lmbench.errors import UsageError
from lmbench.kernels.trace.source import Source

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
            raise UsageError(
                f"{str(source.path)!r} is no trace: an event is {type(event).__name__}, not an object; give one that "
                "torch.profiler wrote"
            )
        if event.get("ph") == "X" and isinstance(category := event.get("cat"), str) and category in wanted:
            wanted[category].append(event)
    device = [event for name in DEVICE_CATEGORIES for event in wanted[name]]
    launches = [event for name in LAUNCH_CATEGORIES for event in wanted[name]]
    host = [event for name in HOST_CATEGORIES for event in wanted[name]]
    if not device and not host:
        raise UsageError(
            f"{str(source.path)!r} has no operators and no kernels among its {len(source.events)} events; "
            "give a trace that torch.profiler wrote"
        )
    try:
        return _assemble(device, launches, host)
    except _Malformed as error:
        raise UsageError(
            f"{str(source.path)!r} is damaged: {error}; give a trace as torch.profiler wrote it"
        ) from error
    except _Several as error:
        raise UsageError(f"{str(source.path)!r} {error}; give the trace of one rank") from error


class _Malformed(Exception):
    pass


class _Several(Exception):
    pass


def _assemble(device: list[dict[str, Any]], launches: list[dict[str, Any]], host: list[dict[str, Any]]) -> Events:
    for event in (*device, *launches, *host):
        if not isinstance(event.get("name"), str):
            raise _Malformed(f"an event of category {event['cat']} has no name")
        if not isinstance(event.get("args", {}), dict):
            raise _Malformed(f"the args of event {event['name'][:60]!r} are no object")
    _one_process(host or launches)
    _one_device(device)
    for event in (*device, *launches, *host):
        _check_time(event)
    # Times count from the first event: a 64-bit float cannot hold nanoseconds since 1970.
    base_us = min(event["ts"] for event in (*device, *launches, *host))
    threads: dict[Any, int] = {}
    host_events = _host(host, threads, base_us)
    return Events(
        host_events, _launches(launches, threads, base_us), _device(device, base_us), _main_thread(host_events)
    )


def _check_time(event: dict[str, Any]) -> None:
    for key in ("ts", "dur"):
        value: Any = event.get(key)
        if type(value) not in (int, float) or not 0 <= value <= _MAX_US:
            raise _Malformed(f"event {event['name'][:60]!r} has {key} {str(value)[:40]!r}, not a time in us")


def _one_process(events: list[dict[str, Any]]) -> None:
    processes = {str(event.get("pid")) for event in events}
    if len(processes) > 1:
        raise _Several(f"holds {len(processes)} processes ({', '.join(sorted(processes)[:4])})")


def _one_device(events: list[dict[str, Any]]) -> None:
    devices = {str(event.get("args", {}).get("device", event.get("pid"))) for event in events}
    if len(devices) > 1:
        raise _Several(f"holds kernels of {len(devices)} devices ({', '.join(sorted(devices)[:4])})")


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
