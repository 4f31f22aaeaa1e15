"""What else the machine did in a window: other processes on the cores that this one may use, and its own waiting.

By the kernel's counters, which cost nothing in between: /proc/stat (proc(5)), the scheduler's run delay
(Documentation/scheduler/sched-stats.rst), and for this process and its children their CPU time. Only on Linux.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from lmbench.instruments.host import affinity, load_per_core
from lmbench.records.measured import HostState

#: /proc/stat counts in ticks of 10 ms: over less than this its shares say little.
_LEAST_S = 0.2
#: Columns of a core's line: user, nice, system, idle, iowait, irq, softirq, steal.
_BUSY = (0, 1, 2, 5, 6)
_STEAL = 7


@dataclass(frozen=True)
class HostReading:
    """Counters at one moment, in seconds since some beginning; None where the system does not tell."""

    read_at_s: float
    cores: int
    busy_s: float | None
    stolen_s: float | None
    own_s: float
    waited_s: float | None


def read_host() -> HostReading:
    """Read them; takes a millisecond or so."""
    cores = affinity() or list(range(os.cpu_count() or 1))
    lines = _cpu_lines(cores)
    tick = os.sysconf("SC_CLK_TCK")
    return HostReading(
        read_at_s=time.perf_counter(),
        cores=len(cores),
        busy_s=sum(line[place] for line in lines for place in _BUSY) / tick if lines else None,
        stolen_s=sum(line[_STEAL] for line in lines) / tick if lines else None,
        own_s=time.process_time() + _children_s(tick),
        waited_s=_waited_s(),
    )


def host_state(opened: HostReading, closed: HostReading) -> HostState:
    """What two readings say of the time between them, in shares of the time of all cores, or of the time."""
    elapsed_s = closed.read_at_s - opened.read_at_s
    load = load_per_core()
    if elapsed_s < _LEAST_S:
        return HostState(load_per_core=load)
    all_s = elapsed_s * closed.cores
    busy_s, stolen_s, waited_s = (
        None if before is None or after is None else max(after - before, 0.0)
        for before, after in (
            (opened.busy_s, closed.busy_s), (opened.stolen_s, closed.stolen_s), (opened.waited_s, closed.waited_s)
        )
    )  # fmt: skip
    others_s = None if busy_s is None else max(busy_s - (closed.own_s - opened.own_s), 0.0)
    return HostState(
        load_per_core=load,
        other_cpu_fraction=None if others_s is None else min(others_s / all_s, 1.0),
        steal_fraction=None if stolen_s is None else min(stolen_s / all_s, 1.0),
        waited_fraction=None if waited_s is None else min(waited_s / elapsed_s, 1.0),
    )


def _cpu_lines(cores: list[int]) -> list[list[int]]:
    try:
        text = Path("/proc/stat").read_text()
    except OSError:
        return []
    wanted = {f"cpu{core}" for core in cores}
    found = [line.split() for line in text.splitlines() if line.startswith("cpu")]
    return [[*map(int, numbers)] for name, *numbers in found if name in wanted and len(numbers) > _STEAL]


def _children_s(tick: int) -> float:
    """CPU time of the processes that this one started, ended ones included: loaders' workers are no strangers."""
    ended = os.times()
    total = ended.children_user + ended.children_system
    parents, own_s = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # A name in parentheses may have blanks and parentheses of its own.
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(path.parent.name)
        parents[pid], own_s[pid] = int(fields[1]), sum(map(int, fields[11:15])) / tick
    found = {os.getpid()}
    while found := {pid for pid, parent in parents.items() if parent in found}:
        total += sum(own_s[pid] for pid in found)
    return total


def _waited_s() -> float | None:
    """How long this thread was ready to run and had no core, since it began."""
    try:
        return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return None
