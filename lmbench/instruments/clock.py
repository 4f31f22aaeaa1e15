"""The three clocks a step can be measured with: device events, synchronized host time, plain host time.

A clock hands out opaque stamps. `events` never makes the host wait: stamps are CUDA events, read after the device
has passed them. `sync` waits for the device at every stamp, which is the classic method and slows the run; it is
the second instrument, never the source of a timing table. `host` is the clock of a CPU run. Beside them a ring for
scalars that live on the device, which are read when their step has been passed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch


class HostClock:
    """`time.perf_counter_ns`, for work that runs on the CPU. Stamps of every clock are opaque to all others."""

    name = "host"
    #: Whether device and host time differ, so that a lag between them means something.
    has_lag = False

    def stamp(self) -> Any:
        return time.perf_counter_ns()

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start) * 1e-9

    def is_reached(self, stamp: Any) -> bool:
        return True

    def recycle(self, stamps: Iterable[Any]) -> None:
        """Take back stamps that nobody reads again."""


class EventClock(HostClock):
    """CUDA events on the stream that was current when the clock was made."""

    name = "events"
    has_lag = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._free = [torch.cuda.Event(enable_timing=True) for _ in range(256)]
        # An event's CUDA object is created by its first record; do that now, not in the window.
        for event in self._free:
            event.record(self._stream)

    def stamp(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Device seconds between two reached stamps; accurate between neighbours only (float32 milliseconds)."""
        return float(start.elapsed_time(end)) * 1e-3

    def is_reached(self, stamp: torch.cuda.Event) -> bool:
        return bool(stamp.query())

    def recycle(self, stamps: Iterable[torch.cuda.Event]) -> None:
        self._free.extend(stamps)


class SyncClock(HostClock):
    """Host time after waiting for the device at every stamp."""

    name = "sync"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> int:
        torch.cuda.synchronize(self._device)
        return time.perf_counter_ns()


def synchronize(device: torch.device) -> None:
    """Wait for `device`; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_clock(name: str, device: torch.device) -> HostClock:
    """The clock called `name` (`events` or `sync`) on `device`; on a CPU both are the host clock."""
    if device.type != "cuda":
        return HostClock()
    return EventClock(device) if name == "events" else SyncClock(device)


#: Values that may be under way to the host at once. Older ones are overwritten.
_UNDER_WAY = 8192


class ScalarRing:
    """Copies device scalars into pinned host memory, in stream order, and reads them once their step is done.

    A copy costs one asynchronous launch. A value may be read when an event recorded after its copy has been reached;
    the ring holds as many values as can be under way at once.

    Args:
        device: where the scalars live.
    """

    def __init__(self, device: torch.device) -> None:
        self._host = torch.zeros(_UNDER_WAY, dtype=torch.float32, pin_memory=device.type == "cuda")
        self._slots = self._host.unbind()
        self._next = 0

    def put(self, value: torch.Tensor) -> int:
        """Copy a one-element tensor; returns the slot to read later."""
        slot = self._next
        self._next = (slot + 1) % len(self._slots)
        # What Lightning hands out needs neither, and each would be one more call for every step.
        if value.requires_grad:
            value = value.detach()
        if value.ndim:
            value = value.reshape(())
        self._slots[slot].copy_(value, non_blocking=True)
        return slot

    def get(self, slot: int) -> float:
        return float(self._host[slot])
