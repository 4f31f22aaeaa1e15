"""When a command reached what, in seconds since its process began: where the time around a measurement goes.

Nothing is kept unless `begin` was called, which only lmbench's own command line does.
"""

from __future__ import annotations

import os
import time
from typing import Literal

from lmbench.records.process import process_start_s
from lmbench.records.run import Milestones

Milestone = Literal[
    "started", "imported", "parsed", "device_ready", "built", "ready", "first_step", "window_opened", "window_closed",
    "stepped", "closed",
]  # fmt: skip

_reached: dict[str, float] = {}
_began_s: float | None = None


def clock_s() -> float:
    """Seconds since boot, on the clock that the kernel dates processes by (to its tick, mostly 10 ms)."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def begin() -> None:
    """Start anew: a process may run several commands, or be forked from one that did."""
    global _began_s  # noqa: PLW0603 (one process, one beginning)
    now_s = clock_s()
    started_s = process_start_s(os.getpid())
    # Containers may show another clock's time; then only what comes from now on is known.
    _began_s = started_s if started_s is not None and now_s - started_s >= 0 else now_s
    _reached.clear()
    reach("started")


def reach(name: Milestone) -> None:
    """Note that a milestone is reached, for the first time."""
    if _began_s is not None:
        _reached.setdefault(f"{name}_s", clock_s() - _began_s)


def milestones() -> Milestones:
    """Those reached so far."""
    return Milestones(**_reached)
