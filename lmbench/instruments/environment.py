"""Everything around a run that its times may depend on: versions, code, devices, flags, variables; what the host is,
how fast it issues work, and what others took of it in a window; and how the GPU stands.

What others took is known by the kernel's counters, which cost nothing in between: the cores' busy time (proc(5), by
psutil), the CPU time of this process and its children, and the scheduler's run delay
(Documentation/scheduler/sched-stats.rst). The GPU is asked by NVML: every figure that the card or driver does not give
is None; without NVML, or on a CPU, all of them are.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import subprocess
import threading
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from timeit import repeat
from typing import Any, NamedTuple, TypeVar

import psutil
import torch

import lmbench
from lmbench.instruments.clock import synchronize
from lmbench.masking import is_secret
from lmbench.records.measured import DeviceReading, DeviceState, HostState
from lmbench.records.process import load_per_core
from lmbench.records.run import Code, Environment, Flags, GarbageCollection, Gpu, Host, Revision, Versions

T = TypeVar("T")

#: Only variables whose names begin so are recorded, and none whose name looks like a secret's.
_ALLOWED = ("CUDA_", "PYTORCH_", "TORCH", "NCCL_", "OMP_", "MKL_")

_GIT_TIMEOUT_S = 5.0


def capture_environment(device: torch.device) -> Environment:
    """The `environment` of a run's record.

    Call it when all settings are made, outside the window: it synchronizes.
    """
    sensor = DeviceSensor(device)
    return Environment(
        versions=versions(sensor.driver()),
        code=Code(
            project=git_state(Path.cwd()),
            lmbench=git_state(Path(lmbench.__file__).parent, holds="__init__.py"),
        ),
        gpu=sensor.facts(),
        host=host_facts(device),
        gc=GarbageCollection(gc.isenabled(), list(gc.get_threshold()), gc.get_freeze_count()),
        flags=torch_flags(),
        # Sorted; never one whose name looks like a secret's.
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.upper().startswith(_ALLOWED) and not is_secret(name)
        },
    )


def versions(driver: str | None) -> Versions:
    """Versions of what takes part. Packages are asked for their metadata, not imported."""
    cudnn: int | None = torch.backends.cudnn.version() if torch.version.cuda else None
    packages: dict[str, str] = {}
    for package in ("lightning", "torchmetrics", "wandb"):
        with suppress(metadata.PackageNotFoundError):
            packages[package] = metadata.version(package)
    return Versions(
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        cudnn=None if cudnn is None else str(cudnn),
        driver=driver,
        lmbench=lmbench.__version__,
        **packages,
    )


def torch_flags() -> Flags:
    """Global switches; None where reading one is refused (old and new TF32 settings exclude each other)."""
    cudnn = torch.backends.cudnn
    return Flags(
        float32_matmul_precision=_or_none(torch.get_float32_matmul_precision),
        cuda_matmul_allow_tf32=_or_none(lambda: torch.backends.cuda.matmul.allow_tf32),
        cudnn_allow_tf32=_or_none(lambda: cudnn.allow_tf32),
        cudnn_benchmark=cudnn.benchmark,
        cudnn_deterministic=cudnn.deterministic,
        deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
        anomaly_mode=torch.is_anomaly_enabled(),
        allocator_backend=torch.cuda.get_allocator_backend() if torch.version.cuda else None,
        thread_count=torch.get_num_threads(),
    )


def _or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except RuntimeError:
        return None


def git_state(folder: Path, holds: str | None = None) -> Revision:
    """`commit` of the repository that the folder belongs to; `is_dirty` if its tracked files differ from it.

    Both are None without git or a repository. With `holds` also where the repository does not track that file
    of the folder: a package installed below somebody's project is not part of it.
    """
    if holds is not None and _git(folder, "ls-files", "--error-unmatch", holds) is None:
        return Revision()
    # Untracked files do not count: the results folder itself would make every second run dirty.
    state = _git(folder, "describe", "--always", "--exclude=*", "--abbrev=64", "--dirty")
    if state is None:
        return Revision()
    commit, _, dirty = state.partition("-")
    return Revision(commit, bool(dirty))


def _git(folder: Path, *args: str) -> str | None:
    # Without the optional lock a status of ours cannot get in the way of a user's git command.
    command, variables = ["git", "-C", str(folder), *args], {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        output = subprocess.check_output(
            command, text=True, stderr=subprocess.DEVNULL, timeout=_GIT_TIMEOUT_S, env=variables
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return output.strip()


_REPEATS = 5
_LOOP = "total = 0\nfor i in range(50_000):\n    total += i & 7"
#: The cores' times are counted in ticks of 10 ms: over less than this their shares say little.
_LEAST_S = 0.2
#: What keeps a core from others.
_BUSY = ("user", "nice", "system", "irq", "softirq")


def host_facts(device: torch.device) -> Host:
    """The machine and its two scores: the fields of `environment.host`. Takes some 30 ms and synchronizes."""
    return Host(
        hostname=platform.node() or None,
        system=platform.platform(),
        cpu_model=_proc_field("/proc/cpuinfo", "model name", "Model", "cpu model") or platform.processor() or None,
        core_count=os.cpu_count(),
        affinity=_usable_cores(),
        memory_total_bytes=psutil.virtual_memory().total,
        # One turn of a small pure-Python loop.
        python_iteration_s=min(repeat(_LOOP, number=1, repeat=_REPEATS)) / 50_000,
        kernel_launch_s=kernel_launch_s(device),
    )


def _proc_field(path: str, *names: str) -> str | None:
    """The first field of one of these names in a file of /proc with `name: value` lines."""
    with suppress(OSError):
        for line in Path(path).read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return None


def kernel_launch_s(device: torch.device) -> float:
    """Host seconds to issue one tiny in-place addition, the fastest of 5 tries (on a CPU, to execute it)."""
    vector = torch.zeros(1, device=device)

    def launch() -> None:
        # From about 1000 on a CUDA launch queue is full, and the host waits for the device.
        for _ in range(256):
            vector.add_(1.0)

    with torch.no_grad():
        launches_s = min(repeat(launch, partial(synchronize, device), number=1, repeat=_REPEATS))
    synchronize(device)
    return launches_s / 256


def peak_rss_bytes() -> int | None:
    """Peak resident memory of this process so far, None where the system does not say.

    From VmHWM of /proc/self/status: what getrusage says on Linux is never less than the size its parent had
    when it started this process, so that every cell of a sweep would show the runner's memory.
    """
    peak = _proc_field("/proc/self/status", "VmHWM")
    return None if peak is None else int(peak.split()[0]) * 1024


class HostReading(NamedTuple):
    """Counters at one moment, in seconds since some beginning.

    Of `cores` cores that this process may use: `busy_s`, and `stolen_s` by the hypervisor. `own_s` is the CPU time of
    this process and its descendants: a loader's workers are no strangers. `waited_s` is how long this thread was ready
    to run and had no core; None where the system does not tell.
    """

    read_at_s: float
    cores: int
    busy_s: float
    stolen_s: float
    own_s: float
    waited_s: float | None


def read_host() -> HostReading:
    """Read the counters; takes a millisecond or so."""
    usable = _usable_cores() or list(range(os.cpu_count() or 1))
    by_core = psutil.cpu_times(percpu=True)
    cores = [by_core[core]._asdict() for core in usable if core < len(by_core)]
    process, own_s, waited_s = psutil.Process(), 0.0, None
    # The other ranks of this host are no strangers either: their launcher is the parent of them all.
    launcher = process.parent() if "LOCAL_RANK" in os.environ else None
    for one in {process, *(launcher or process).children(recursive=True)}:
        with suppress(psutil.Error):
            # With its children that have ended.
            own_s += sum(one.cpu_times()[:4])
    with suppress(OSError, IndexError, ValueError):
        text = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
        waited_s = int(text.split()[1]) * 1e-9
    busy_s = sum(core.get(kind, 0.0) for core in cores for kind in _BUSY)
    stolen_s = sum(core.get("steal", 0.0) for core in cores)
    return HostReading(time.perf_counter(), len(usable), busy_s, stolen_s, own_s, waited_s)


def _usable_cores() -> list[int] | None:
    """Cores that this process may run on, None where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def host_state(opened: HostReading, closed: HostReading) -> HostState:
    """What two readings say of the time between them, in shares of the time of all cores, or of the time."""
    elapsed_s = closed.read_at_s - opened.read_at_s
    state = HostState(load_per_core=load_per_core())
    if elapsed_s < _LEAST_S:
        return state

    def share(taken_s: float, of_s: float) -> float:
        return min(max(taken_s / of_s, 0.0), 1.0)

    all_s, own_s = elapsed_s * closed.cores, closed.own_s - opened.own_s
    state.other_cpu_fraction = share(closed.busy_s - opened.busy_s - own_s, all_s)
    state.steal_fraction = share(closed.stolen_s - opened.stolen_s, all_s)
    if opened.waited_s is not None and closed.waited_s is not None:
        state.waited_fraction = share(closed.waited_s - opened.waited_s, elapsed_s)
    return state


@cache
def _questions() -> dict[str, dict[str, Any]]:
    """The tables of nvml.toml, which says what they hold."""
    return tomllib.loads(Path(__file__).with_name("nvml.toml").read_text())


class DeviceSensor:
    """Reads the device that PyTorch calls `device`.

    NVML counts all GPUs of the machine in another order than CUDA_VISIBLE_DEVICES shows them, so the device
    is found by its UUID or its PCI address, never by its index.
    """

    def __init__(self, device: torch.device) -> None:
        import pynvml  # type: ignore[import-untyped]

        self._nvml: Any = pynvml
        self._gpu = _torch_facts(device) if device.type == "cuda" else None
        self._handle = _find(pynvml, self._gpu) if self._gpu is not None else None

    def facts(self) -> Gpu:
        """What does not change. Where NVML does not answer, PyTorch does for what it knows."""
        gpu, mig = self._gpu or Gpu(), self._ask("MigMode")
        for name, question in _questions()["gpu"].items():
            setattr(gpu, name, self._ask(*question) or getattr(gpu, name))
        gpu.is_mig = None if mig is None else bool(mig[0])
        return gpu

    def read(self) -> DeviceReading:
        """How the device stands now. Takes about a millisecond."""
        # Beside the energy counter, since mean power is their quotient.
        energy_j, read_at_s = self._ask("TotalEnergyConsumption", scale=1e-3), time.monotonic()
        reasons, processes = self._ask("CurrentClocksThrottleReasons"), self._ask("ComputeRunningProcesses")
        names = _questions()["throttle_reasons"].items()
        pids = None if processes is None else [process.pid for process in processes]
        other_pids, other_count = other_processes(pids, torch.cuda.is_initialized())
        return DeviceReading(
            read_at_s=read_at_s,
            energy_j=energy_j,
            throttle_reasons=None if reasons is None else [name for bit, name in names if reasons & int(bit)],
            other_process_pids=other_pids,
            other_process_count=other_count,
            **{name: self._ask(*question) for name, question in _questions()["reading"].items()},
        )

    def _ask(self, function: str, constant: str = "", part: str = "", scale: float = 0.0) -> Any:
        """The answer of `nvmlDeviceGet<function>` about this device, or a `part` of it, times `scale` if that is not 0;
        `constant` names what is asked for. None where card or driver do not have it."""
        if self._handle is None:
            return None
        try:
            kind = [getattr(self._nvml, constant)] if constant else []
            answer = getattr(self._nvml, f"nvmlDeviceGet{function}")(self._handle, *kind)
        except (self._nvml.NVMLError, AttributeError):
            return None
        answer = getattr(answer, part) if part else answer
        return answer * scale if scale else answer

    def driver(self) -> str | None:
        """Version of the NVIDIA driver."""
        try:
            return str(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError:
            return None


def other_processes(pids: list[int] | None, has_context: bool) -> tuple[list[int] | None, int | None]:
    """Which and how many processes on the GPU are not this one; None where the driver does not let us know.

    `pids` is NVML's list, `has_context` whether this process has the GPU open and so should be in it. In a
    container the list may be empty, or hold the host's process ids: then the others can be counted but not
    named.
    """
    if pids is None:
        return None, None
    pid = os.getpid()
    if pid in pids or not has_context:
        others = sorted(set(pids) - {pid})
        return others, len(others)
    return None, len(pids) - 1 if pids else None


def derive_device_state(opened: DeviceReading, closed: DeviceReading, wall_s: float | None = None) -> DeviceState:
    """What two readings say of the time between them.

    `wall_s` is the window's length, to which the energy is scaled; without it the energy is that between the
    readings.
    """
    elapsed_s = (closed.read_at_s or 0.0) - (opened.read_at_s or 0.0)

    def rate(name: str, most: float = math.inf) -> float | None:
        # A counter that runs backwards was reset in between (the driver was loaded anew): it says nothing. A counter
        # that moves in steps can be ahead of the clock by one.
        before, after = getattr(opened, name), getattr(closed, name)
        if before is None or after is None or after < before or elapsed_s <= 0:
            return None
        per_second: float = (after - before) / elapsed_s
        return min(per_second, most)

    power_w = rate("energy_j")
    state = DeviceState(
        open=opened,
        close=closed,
        mean_power_w=power_w,
        energy_j=None if power_w is None else power_w * (elapsed_s if wall_s is None else wall_s),
        power_capped_fraction=rate("power_capped_s", most=1.0),
        thermal_capped_fraction=rate("thermal_capped_s", most=1.0),
    )
    counts = (opened.other_process_count, closed.other_process_count)
    state.other_process_count = max((count for count in counts if count is not None), default=None)
    if opened.temperature_c is not None and closed.temperature_c is not None:
        state.mean_temperature_c = (opened.temperature_c + closed.temperature_c) / 2
    if opened.sm_clock_hz and closed.sm_clock_hz is not None:
        state.sm_clock_drop_fraction = 1 - closed.sm_clock_hz / opened.sm_clock_hz
    return state


def _torch_facts(device: torch.device) -> Gpu:
    facts = torch.cuda.get_device_properties(device)
    # Which of them are there depends on PyTorch's version.
    domain, bus, slot = (getattr(facts, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    return Gpu(
        name=facts.name,
        uuid=f"GPU-{str(facts.uuid).removeprefix('GPU-')}",
        pci_bus_id=f"{domain:08x}:{bus:02x}:{slot:02x}.0",
        compute_capability=f"{facts.major}.{facts.minor}",
        memory_total_bytes=facts.total_memory,
    )


def _find(nvml: Any, gpu: Gpu) -> Any:
    """NVML's handle of a GPU; None without its library or driver."""
    for find, name in (
        (nvml.nvmlDeviceGetHandleByUUID, gpu.uuid),
        (nvml.nvmlDeviceGetHandleByUUID, str(gpu.uuid).replace("GPU", "MIG", 1)),
        (nvml.nvmlDeviceGetHandleByPciBusId, gpu.pci_bus_id),
    ):
        with suppress(nvml.NVMLError):
            nvml.nvmlInit()
            return find(name)
    return None
