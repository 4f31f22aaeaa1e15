"""What the host is, how fast it issues work, and what the process takes of it."""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lmbench.records.environment import GarbageCollection, Host

if TYPE_CHECKING:
    import torch

_REPEATS = 5


def host_facts(device: torch.device) -> Host:
    """The machine and its two scores: the fields of `environment.host`. Takes some 30 ms and synchronizes."""
    return Host(
        hostname=platform.node() or None,
        system=platform.platform(),
        cpu_model=cpu_model(),
        core_count=os.cpu_count(),
        affinity=affinity(),
        memory_total_bytes=_memory_total_bytes(),
        python_iteration_s=python_iteration_s(),
        kernel_launch_s=kernel_launch_s(device),
    )


def load_per_core() -> float | None:
    """The machine's load of the last minute divided by its cores, None where the system does not tell."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return None


def cpu_model() -> str | None:
    """The processor's name, None where the system gives none."""
    if sys.platform == "linux":
        for line in _lines("/proc/cpuinfo"):
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model"):
                return value.strip()
    return platform.processor() or platform.machine() or None


def affinity() -> list[int] | None:
    """Cores that this process may run on, None where the system does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return sorted(os.sched_getaffinity(0))


def python_iteration_s(iterations: int = 50_000) -> float:
    """Seconds for one turn of a small pure-Python loop, the fastest of 5 tries."""
    best = float("inf")
    for _ in range(_REPEATS):
        total = 0
        start = time.perf_counter_ns()
        for i in range(iterations):
            total += i & 7
        best = min(best, time.perf_counter_ns() - start)
    return best * 1e-9 / iterations


def kernel_launch_s(device: torch.device, launches: int = 256) -> float:
    """Host seconds to issue one tiny in-place addition, the fastest of 5 tries (on a CPU, to execute it).

    Keep `launches` well under 1000: from about there a CUDA launch queue is full and the host waits for the
    device.
    """
    import torch

    one = torch.zeros(1, device=device)
    best = float("inf")
    with torch.no_grad():
        for _ in range(_REPEATS):
            _synchronize(device)
            start = time.perf_counter_ns()
            for _ in range(launches):
                one.add_(1.0)
            best = min(best, time.perf_counter_ns() - start)
    _synchronize(device)
    return best * 1e-9 / launches


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def peak_rss_bytes() -> int | None:
    """Peak resident memory of this process so far, None where the system does not say.

    From VmHWM of /proc/self/status: what getrusage says on Linux is never less than the size its parent had
    when it started this process, so that every cell of a sweep would show the runner's memory.
    """
    for line in _lines("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def gc_policy() -> GarbageCollection:
    """How Python collects garbage here."""
    return GarbageCollection(gc.isenabled(), list(gc.get_threshold()), gc.get_freeze_count())


def _memory_total_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []
