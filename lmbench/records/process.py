"""Which process wrote a result, and whether it is still there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

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
    if start_s is not None or boot is not None:
        return start_s is not None and process_start_s(pid) == start_s
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


class ProcessIdentity(NamedTuple):
    """What tells a process from every other, for ever."""

    pid: int
    boot_id: str | None
    start_s: float | None


def process_identity() -> ProcessIdentity:
    """This process's."""
    pid = os.getpid()
    return ProcessIdentity(pid, boot_id(), process_start_s(pid))
