"""Which process wrote a result, and whether it is still there."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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
