"""One process from its start to its end: in time, in one piece, and with nothing left of it.

Did the kernel end it because memory ran out? Its counters say so; the process itself cannot.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmbench.files import Unreadable, read_file
from lmbench.instruments.milestones import clock_s
from lmbench.interruption import Terminated, held
from lmbench.records.process import boot_id, process_start_s
from lmbench.records.run import RunRecord
from lmbench.sweep.servers import Launch, Process, Servers

#: After SIGTERM or SIGINT a process may close its record; then it is killed.
GRACE_S = 10.0
# How often somebody is told that it still runs.
_TICK_S = 0.5
# Linux allows a process no more.
_MOST_VARIABLES_BYTES = 8 * 2**20
_CGROUPS = Path("/sys/fs/cgroup")

Ended = Literal["itself", "timeout", "interruption"]


@dataclass(frozen=True)
class End:
    """How a process ended.

    `code` is its exit code, or minus the number of the signal that ended it. `by` says whether it ended by itself, or
    was stopped by the sweep: at its time limit, or because the sweep itself is stopped. Times are on `clock_s`.
    `lost` says why nobody knows how it ended: its server was gone first.
    """

    code: int
    by: Ended
    launched_s: float
    ended_s: float
    oom_evidence: str | None = None
    lost: str | None = None

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended it, None if none did."""
        if self.code >= 0:
            return None
        with suppress(ValueError):
            return signal.Signals(-self.code)
        return None


class Stopped(Exception):
    """The sweep was told to stop while a process ran; `end` is how that one ended, `cause` what was raised."""

    def __init__(self, end: End, cause: BaseException) -> None:
        super().__init__("stopped")
        self.end = end
        self.cause = cause


def run_to_end(servers: Servers, launch: Launch, timeout_s: float, tick: Callable[[float], None]) -> End:
    """Start a process and wait for its end; `tick` hears now and then how many seconds it has taken so far.

    Raises:
        Stopped: an interruption came; the process was given time to close its record.
        ServerLost: it cannot be forked.
    """
    counts = kill_counts()
    launched_s = clock_s()
    process: Process | None = None
    code: int | None = None
    by: Ended = "itself"
    cause: BaseException | None = None
    try:
        with held():
            process = servers.start(launch)
        code = _wait(process, launched_s, timeout_s, tick)
        by = "timeout" if code is None else "itself"
    except (KeyboardInterrupt, SystemExit) as interruption:
        if process is None:
            raise
        by, cause = "interruption", interruption
    except BaseException:
        if process is not None:
            _kill_group(process)
        raise
    if code is None:
        code = _stop(process, signal.SIGTERM if by == "timeout" or isinstance(cause, Terminated) else signal.SIGINT)
    _kill_group(process)
    end = End(code, by, launched_s, clock_s(), evidence(counts, kill_counts()), process.lost)
    if cause is not None:
        raise Stopped(end, cause)
    return end


def _wait(process: Process, launched_s: float, timeout_s: float, tick: Callable[[float], None]) -> int | None:
    """The exit code, None where the time was up first."""
    while True:
        elapsed_s = clock_s() - launched_s
        left_s = timeout_s - elapsed_s
        code = process.wait(min(_TICK_S, max(left_s, 0.0)))
        if code is not None or left_s <= 0:
            return code
        tick(elapsed_s)


def _stop(process: Process, signum: int) -> int:
    """Ask a process to end, and kill its group if it does not; returns its exit code."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, signum)
    code = process.wait(GRACE_S)
    while code is None:
        _kill_group(process)
        code = process.wait(GRACE_S)
    return code


def _kill_group(process: Process) -> None:
    """Kill whatever of a process is left: itself, loaders, compilers. The next cell shall have the machine alone."""
    for kill in (os.killpg, os.kill):
        # The group is there as soon as the process has begun; the process may be gone before its group.
        with suppress(ProcessLookupError, PermissionError):
            kill(process.pid, signal.SIGKILL)


# what an earlier sweep left


def kill_own(record: RunRecord, mark: Mapping[str, str]) -> bool:
    """Kill the process that a record says wrote it, where a sweep of this folder started it; returns whether it did.

    A record may come from anywhere, and a process id in it proves nothing. So the process has to be of this boot, to
    have begun when the record says, and to have the sweep's mark among the variables that it was started with. Those
    the kernel keeps, nobody but their user can read them, and no folder that is copied here can put them there: only a
    sweep of this user in this very folder did.
    """
    pid, start_s = record.pid, record.process_start_s
    if pid is None or pid <= 1 or start_s is None or record.boot_id is None or record.boot_id != boot_id():
        return False
    try:
        # It stands for one process, also when the id is used again.
        fd = os.pidfd_open(pid)
    except (OSError, OverflowError, AttributeError):
        return False
    try:
        if process_start_s(pid) != start_s or not _has_variables(pid, mark):
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _has_variables(pid: int, wanted: Mapping[str, str]) -> bool:
    """Whether a process was started with these environment variables."""
    try:
        given = read_file(Path(f"/proc/{pid}/environ"), _MOST_VARIABLES_BYTES).split(b"\0")
    except Unreadable:
        return False
    return bool(wanted) and all(os.fsencode(f"{name}={value}") in given for name, value in wanted.items())


# the kernel's out-of-memory killer


@dataclass(frozen=True)
class KillCount:
    """How many processes the kernel's out-of-memory killer has ended so far, and which file says so."""

    source: str
    count: int


def kill_counts(own_cgroups: Path = Path("/proc/self/cgroup"), machine: Path = Path("/proc/vmstat")) -> list[KillCount]:
    """The counters there are: of the control group that this process is in, else of the whole machine.

    memory.events (cgroup v2), memory.oom_control (cgroup v1) and /proc/vmstat each have a line `oom_kill N`. In a
    container the machine's counts the neighbours' too, so it is asked only where no group's is there.
    """
    for path in (*_group_files(own_cgroups), machine):
        count = _count(path)
        if count is not None:
            return [KillCount(str(path), count)]
    return []


def evidence(before: list[KillCount], after: list[KillCount]) -> str | None:
    """What speaks for a kill in between, None if nothing does."""
    earlier = {counter.source: counter.count for counter in before}
    for counter in after:
        if counter.count > earlier.get(counter.source, counter.count):
            return f"oom_kill in {counter.source} went from {earlier[counter.source]} to {counter.count}"
    return None


def _group_files(own_cgroups: Path) -> list[Path]:
    found: list[Path] = []
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, group = line.split(":", 2)
        inside = group.lstrip("/")
        if not controllers:
            # Version 2, alone or (in /sys/fs/cgroup/unified) beside version 1.
            found += [_CGROUPS / inside / "memory.events", _CGROUPS / "unified" / inside / "memory.events"]
        elif "memory" in controllers.split(","):
            # A container may see its own group as the root of the tree.
            found += [_CGROUPS / "memory" / inside / "memory.oom_control", _CGROUPS / "memory" / "memory.oom_control"]
    return found


def _count(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None
