"""A process of a sweep: what starts it and how it ends. A plan knows jobs, an execution makes a launch of each and a
row of its end; forks of this machine run it in between (`local.py`)."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmbench.sweep.environments import Environment

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Launch:
    """A process to start: `lmbench WORDS` in an environment, with further variables; its output goes to `log`, an
    absolute path. `launcher` are words that start it on several nodes, a process a rank."""

    words: list[str]
    log: Path
    environment: Environment
    variables: dict[str, str]
    launcher: Sequence[str] = ()


@dataclass(frozen=True)
class End:
    """How a process ended.

    `code` is its exit code, or minus the number of the signal that ended it. `by` says whether it ended by itself, or
    was stopped by the sweep: at its time limit, or because the sweep itself is stopped. Times are on `clock_s`.
    `lost` says why nobody knows how it ended: what was to start it, or to wait for it, was gone first, the sweep's task
    on another machine (`by` it), say. `cause` is the
    exception of an interruption, which is to be raised when the process's end is recorded.
    """

    code: int
    by: Literal["itself", "timeout", "interruption", "task"]
    launched_s: float
    ended_s: float
    oom_evidence: str | None = None
    lost: str | None = None
    cause: BaseException | None = None

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended it, None if none did."""
        names = {-number: number.name for number in signal.Signals}
        return None if self.code >= 0 else names.get(self.code, f"signal {-self.code}")


def oom_kill_count() -> tuple[str, int] | None:
    """How many processes the kernel's out-of-memory killer has ended so far, and the file that says so.

    memory.events (cgroup v2), memory.oom_control (cgroup v1) and /proc/vmstat each have a line `oom_kill N`. The
    counter is the control group's that this process is in, else the machine's: in a container that counts the
    neighbours' kills too. A container may see its own group as the root of the tree.
    """
    groups = re.findall(r"^\d+:(?:[^:]*\bmemory\b[^:]*)?:/*(.*)$", _text(Path("/proc/self/cgroup")), re.MULTILINE)
    files = ("{}/memory.events", "unified/{}/memory.events", "memory/{}/memory.oom_control")
    paths = [_CGROUPS / file.format(group) for group in (*groups, ".") for file in files]
    for path in (*paths, Path("/proc/vmstat")):
        if count := re.search(r"^oom_kill (\d+)$", _text(path), re.MULTILINE):
            return str(path), int(count[1])
    return None


def oom_evidence(before: tuple[str, int] | None, after: tuple[str, int] | None) -> str | None:
    """What speaks for a kill between two counts, None if nothing does."""
    if before is None or after is None or before[0] != after[0] or after[1] <= before[1]:
        return None
    return f"oom_kill in {after[0]} went from {before[1]} to {after[1]}"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
