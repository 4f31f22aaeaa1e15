"""The identity of the process that writes a result, and its milestones, which show how long each part of a run takes.

Milestones are kept after a call of `begin`, which only lmbench's command line makes.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil

from lmbench.records.run import Milestones


def now() -> str:
    """The present time as records write it: UTC, ISO 8601, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def boot_id() -> str | None:
    """The kernel's random id of this boot; None where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def process_start_s(pid: int) -> float | None:
    """Start of a process in seconds since boot, to a clock tick; None if it is gone or the system has no /proc.

    The source is field 22 of /proc/PID/stat (proc(5)). A zombie, which ended but was not waited for, counts as gone.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The second field is the program's name in brackets; the name may contain spaces and brackets.
    fields = stat.rpartition(b")")[2].split()
    if fields[0] in b"ZX":
        return None
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def is_running(pid: int, boot: str | None, start_s: float | None) -> bool:
    """Whether the process with this id, boot and start still runs on this machine; an id alone may be used again."""
    return boot == boot_id() and start_s is not None and process_start_s(pid) == start_s


def process_identity() -> tuple[int, str | None, float | None]:
    """Id, boot id and start of this process; together they identify it for ever."""
    pid = os.getpid()
    return pid, boot_id(), process_start_s(pid)


_reached: dict[str, float] = {}
_began_s: float | None = None


def clock_s() -> float:
    """Seconds since boot, on the kernel's clock for the start of processes."""
    # Results are read on a Mac too, which has no such clock.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def begin() -> None:
    """Forget all milestones and start anew: a process may run several commands, or be a fork of one that did."""
    global _began_s  # noqa: PLW0603 (one process, one beginning)
    now_s = clock_s()
    started_s = process_start_s(os.getpid())
    # In a container the start may be on another clock; then milestones count from now.
    _began_s = started_s if started_s is not None and now_s - started_s >= 0 else now_s
    _reached.clear()
    reach("started")


def reach(name: str) -> None:
    """Note the time of a milestone, a field of `Milestones` without `_s`, when it is reached for the first time."""
    if _began_s is not None:
        _reached.setdefault(f"{name}_s", clock_s() - _began_s)


def milestones() -> Milestones:
    """The milestones reached so far."""
    return Milestones(**_reached)


def load_per_core() -> float:
    """The machine's load average of the last minute, divided by its cores."""
    return psutil.getloadavg()[0] / (os.cpu_count() or 1)
