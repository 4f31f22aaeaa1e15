"""The three clocks of a step (device events, synchronized host time, plain host time), and a ring of device scalars.

A clock hands out stamps that only itself can read. `events` never makes the host wait: its stamps are CUDA events, read
after the device has passed them. `sync` waits for the device at every stamp. That is the classic method and slows the
run, so it is a second instrument and no source of timing tables. `host` is the clock of a run on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch


class HostClock:
    """`time.perf_counter_ns`, for work that runs on the CPU."""

    name = "host"
    #: Whether device time and host time differ, so that there is a lag between them.
    has_lag = False

    def stamp(self) -> Any:
        return time.perf_counter_ns()

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start) * 1e-9

    def is_reached(self, stamp: Any) -> bool:
        return True

    def recycle(self, stamps: Iterable[Any]) -> None:
        """Reuse stamps that nobody will read again."""


class EventClock(HostClock):
    """CUDA events on the stream that was current when the clock was made."""

    name = "events"
    has_lag = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._free = [torch.cuda.Event(enable_timing=True) for _ in range(256)]
        # The first record of an event creates its CUDA object: record here, not first in the window.
        for event in self._free:
            event.record(self._stream)

    def stamp(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Device seconds between two reached stamps, in float32 milliseconds: accurate between neighbours only."""
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
    """Wait until `device` has finished its work; return at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_clock(name: str, device: torch.device) -> HostClock:
    """The clock called `name` (`events` or `sync`) on `device`; on a CPU both are the host clock."""
    if device.type != "cuda":
        return HostClock()
    return EventClock(device) if name == "events" else SyncClock(device)


#: Values that can be on their way to the host at once; older ones are overwritten.
_RING_SIZE = 8192


class ScalarRing:
    """Copies device scalars into pinned host memory, in stream order, for reading when their step is done.

    A copy costs one asynchronous launch. Its value may be read once the device has reached an event recorded after it.

    Args:
        device: device of the scalars.
    """

    def __init__(self, device: torch.device) -> None:
        self._host = torch.zeros(_RING_SIZE, dtype=torch.float32, pin_memory=device.type == "cuda")
        self._slots = self._host.unbind()
        self._next = 0

    def put(self, value: torch.Tensor) -> int:
        """Copy a one-element tensor to the host; returns the slot to read later."""
        slot = self._next
        self._next = (slot + 1) % len(self._slots)
        # Lightning's losses need neither call, so test first and save two calls a step.
        if value.requires_grad:
            value = value.detach()
        if value.ndim:
            value = value.reshape(())
        self._slots[slot].copy_(value, non_blocking=True)
        return slot

    def get(self, slot: int) -> float:
        return float(self._host[slot])
