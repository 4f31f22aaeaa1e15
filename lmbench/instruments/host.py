"""The machine: its facts, its speed in issuing work, and the load of other processes in the window.

The kernel's counters tell the load and cost nothing between two readings: the cores' busy time (proc(5), by psutil),
the CPU time of this process and its children, and the scheduler's run delay (Documentation/scheduler/sched-stats.rst).
"""

from __future__ import annotations

import os
import platform
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from timeit import repeat
from typing import NamedTuple

import psutil
import torch

from lmbench.device import synchronize
from lmbench.python_process import PAIR
from lmbench.records.measured import HostState
from lmbench.records.process import load_per_core
from lmbench.records.run import HostFacts

_REPEATS = 5
_LOOP = "total = 0\nfor i in range(50_000):\n    total += i & 7"
#: Shares of the cores' time need at least this long, since it is counted in ticks of 10 ms.
_MIN_ELAPSED_S = 0.2


def host_facts(device: torch.device) -> HostFacts:
    """The `environment.host` of a run's record: the machine and its two speed scores.

    Takes about 30 ms and synchronizes.
    """
    return HostFacts(
        hostname=platform.node() or None,
        cpu_model=_proc_field("/proc/cpuinfo", "model name", "Model", "cpu model") or platform.processor() or None,
        core_count=os.cpu_count(),
        affinity=sorted(os.sched_getaffinity(0)),
        python_iteration_s=min(repeat(_LOOP, number=1, repeat=_REPEATS)) / 50_000,
        kernel_launch_s=kernel_launch_s(device),
    )


def _proc_field(path: str, *names: str) -> str | None:
    """The first value under one of the names in a /proc file of `name: value` lines; None without one."""
    with suppress(OSError):
        for line in Path(path).read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return None


def kernel_launch_s(device: torch.device) -> float:
    """Host seconds to issue one tiny in-place addition, the fastest of 5 tries; on a CPU to execute it."""
    vector = torch.zeros(1, device=device)

    def launch() -> None:
        # Stay below about 1000 launches, which fill the queue of a CUDA device so that the host waits.
        for _ in range(256):
            vector.add_(1.0)

    with torch.no_grad():
        launches_s = min(repeat(launch, partial(synchronize, device), number=1, repeat=_REPEATS))
    synchronize(device)
    return launches_s / 256


def peak_rss_bytes() -> int | None:
    """Peak resident memory of this process so far; None where the system does not tell.

    Read from VmHWM in /proc/self/status. On Linux getrusage is never below the size of the parent when it started this
    process. So every cell of a sweep would show the runner's memory.
    """
    peak = _proc_field("/proc/self/status", "VmHWM")
    return None if peak is None else int(peak.split()[0]) * 1024


def reset_peak_rss() -> None:
    """Let the peak begin anew with the memory that this process has now; without effect where Linux refuses it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class HostReading(NamedTuple):
    """The kernel's counters at one moment, in seconds since an arbitrary start.

    Attributes:
        read_at_s: the moment.
        cores: number of cores that this process may use.
        busy_s: their busy time.
        stolen_s: their time that the hypervisor gave to other machines.
        own_s: CPU time of this process and its descendants, such as a loader's workers.
        waited_s: time in which this thread was ready to run and had no core; None where the system does not tell.
        page_faults: pages that this process got from the kernel, without reading from a disk.
    """

    read_at_s: float
    cores: int
    busy_s: float
    stolen_s: float
    own_s: float
    waited_s: float | None
    page_faults: int


def read_host() -> HostReading:
    """Read the counters; takes about a millisecond."""
    usable = sorted(os.sched_getaffinity(0))
    by_core = psutil.cpu_times(percpu=True)
    cores = [by_core[core] for core in usable if core < len(by_core)]
    this_process = top = psutil.Process()
    own_s = 0.0
    # Other ranks on this host count as own processes too, and so does the side of a comparison that takes turns.
    with suppress(psutil.Error):
        if PAIR in os.environ:
            top = psutil.Process(int(os.environ[PAIR]))
        elif "LOCAL_RANK" in os.environ:
            top = this_process.parent() or top
    for process in {this_process, *top.children(recursive=True)}:
        with suppress(psutil.Error):
            # User and system time of the process and of its children that have ended.
            own_s += sum(process.cpu_times()[:4])
    busy_s = sum(core.user + core.nice + core.system + core.irq + core.softirq for core in cores)
    stolen_s = sum(core.steal for core in cores)
    page_faults = getrusage(RUSAGE_SELF).ru_minflt
    waited = waited_s(threading.get_native_id())
    return HostReading(time.perf_counter(), len(usable), busy_s, stolen_s, own_s, waited, page_faults)


def waited_s(native_id: int) -> float | None:
    """Time in which a thread of this process was ready to run and had no core; None where the system does not tell."""
    with suppress(OSError, IndexError, ValueError):
        text = Path(f"/proc/self/task/{native_id}/schedstat").read_text()
        return int(text.split()[1]) * 1e-9
    return None


def host_state(opened: HostReading, closed: HostReading) -> HostState:
    """The `host_state` of a run's record, from readings at the window's start and end.

    `other_cpu_fraction` and `steal_fraction` are shares of the time of all cores, `waited_fraction` of the window. They
    are None for a window of less than 0.2 s.
    """
    elapsed_s = closed.read_at_s - opened.read_at_s
    state = HostState(load_per_core=load_per_core(), page_fault_count=closed.page_faults - opened.page_faults)
    if elapsed_s < _MIN_ELAPSED_S:
        return state

    def share(taken_s: float, of_s: float) -> float:
        return min(max(taken_s / of_s, 0.0), 1.0)

    all_s, own_s = elapsed_s * closed.cores, closed.own_s - opened.own_s
    state.other_cpu_fraction = share(closed.busy_s - opened.busy_s - own_s, all_s)
    state.steal_fraction = share(closed.stolen_s - opened.stolen_s, all_s)
    if opened.waited_s is not None and closed.waited_s is not None:
        state.waited_fraction = share(closed.waited_s - opened.waited_s, elapsed_s)
    return state
