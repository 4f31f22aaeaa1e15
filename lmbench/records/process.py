"""Which process wrote a result, whether it is still there, and when it reached what: where the time around a
measurement goes. Milestones are kept from `begin` on, which only lmbench's own command line calls.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil

from lmbench.records.run import Milestones

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def now() -> str:
    """The present time, as records have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def boot_id() -> str | None:
    """The kernel's random id of this boot, None where the system has none."""
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None


def process_start_s(pid: int) -> float | None:
    """When a process started, in seconds since boot (to a clock tick); None if it is gone or nobody says.

    From field 22 of /proc/PID/stat (proc(5)). A process that has ended but was not waited for counts as gone.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in brackets, which may hold spaces and brackets itself.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def is_running(pid: int, boot: str | None, start_s: float | None) -> bool:
    """Whether the process with this id, of this boot and with this start, still runs on this machine.

    A process id alone proves nothing, since ids are used again; it is taken only where the system tells no more.
    """
    if pid < 1 or boot != boot_id():
        return False
    if start_s is None and boot is None:
        return psutil.pid_exists(min(pid, 2**31 - 1))
    return start_s is not None and process_start_s(pid) == start_s


def process_identity() -> tuple[int, str | None, float | None]:
    """Process id, boot id and start of this process, which tell it from every other, for ever."""
    pid = os.getpid()
    return pid, boot_id(), process_start_s(pid)


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


def reach(name: str) -> None:
    """Note that a milestone, a field of `Milestones` without its unit, is reached, for the first time."""
    if _began_s is not None:
        _reached.setdefault(f"{name}_s", clock_s() - _began_s)


def milestones() -> Milestones:
    """Those reached so far."""
    return Milestones(**_reached)


def load_per_core() -> float:
    """The machine's load of the last minute divided by its cores."""
    return psutil.getloadavg()[0] / (os.cpu_count() or 1)
