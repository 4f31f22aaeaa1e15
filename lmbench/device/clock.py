"""The clocks that every kind of device has: plain host time, and host time after waiting for the device.

A clock hands out stamps that only itself can read. `host` is the clock of a run on a CPU. `sync` waits for the device
at every stamp. That is the classic method and slows the run, so it is a second instrument and no source of timing
tables. The third clock, `events`, is the device's own and never makes the host wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import Any


class HostClock:
    """`time.perf_counter_ns`, for work that runs on the CPU.

    Here, and where the window is timed, the function is imported by its name: a module that stops the one in `time`
    would hold the window open for ever.
    """

    name = "host"
    #: Whether device time and host time differ, so that there is a lag between them.
    has_lag = False

    def stamp(self) -> Any:
        return perf_counter_ns()

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start) * 1e-9

    def is_reached(self, stamp: Any) -> bool:
        return True

    def recycle(self, stamps: Iterable[Any]) -> None:
        """Reuse stamps that nobody will read again."""


class SyncClock(HostClock):
    """Host time after waiting for the device at every stamp.

    Args:
        synchronize: waits for the device.
    """

    name = "sync"

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self._synchronize = synchronize

    def stamp(self) -> int:
        self._synchronize()
        return perf_counter_ns()
