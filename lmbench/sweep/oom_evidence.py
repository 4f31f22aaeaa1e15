"""Did the kernel end a process because memory ran out? Its counters say so; the process itself cannot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


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
