"""Reads the surroundings of a run on which its times may depend.

These are versions, code, flags and variables; the host, its speed in issuing work, and the load of other processes
in the window; and the state of the GPU.

The kernel's counters tell the load of other processes and cost nothing between two readings: the cores' busy time
(proc(5), by psutil), the CPU time of this process and its children, and the scheduler's run delay
(Documentation/scheduler/sched-stats.rst). NVML tells the state of the GPU. A figure that the card or the driver does
not give is None; without NVML, and on a CPU, all of them are.
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

from lmbench import version
from lmbench.instruments.clock import synchronize
from lmbench.masking import is_secret
from lmbench.records.measured import DeviceReading, DeviceState, HostState
from lmbench.records.process import load_per_core
from lmbench.records.run import Code, Environment, Flags, GarbageCollection, Gpu, Host, Revision, Versions
from lmbench.records.vocabulary import Values

T = TypeVar("T")

#: Beginnings of the names of variables that are recorded, unless a name looks like a secret's.
_ALLOWED = ("CUDA_", "PYTORCH_", "TORCH", "NCCL_", "OMP_", "MKL_")

_GIT_TIMEOUT_S = 5.0


def capture_environment(device: torch.device) -> Environment:
    """The `environment` of a run's record.

    Call it after all settings are made, and outside the window, because it synchronizes.
    """
    sensor = DeviceSensor(device)
    return Environment(
        versions=versions(sensor.driver()),
        code=Code(
            project=git_state(Path.cwd()),
            lmbench=git_state(Path(version.__file__).parent, holds="__init__.py"),
        ),
        gpu=sensor.facts(),
        host=host_facts(device),
        gc=GarbageCollection(gc.isenabled(), list(gc.get_threshold()), gc.get_freeze_count()),
        flags=torch_flags(),
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.upper().startswith(_ALLOWED) and not is_secret(name)
        },
    )


def versions(driver: str | None) -> Versions:
    """Versions of Python, PyTorch, CUDA, the driver and packages; packages are not imported for it."""
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
        lmbench=version.__version__,
        **packages,
    )


def torch_flags() -> Flags:
    """PyTorch's global switches; None where PyTorch refuses to read one, since old and new TF32 settings conflict."""
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
    """The commit of a folder's repository, and whether tracked files differ from it.

    Both are None without git or a repository.

    Args:
        folder: a folder in the repository.
        holds: a file of the folder. If the repository does not track it, both are None too: a package that is installed
            below a project is not part of the project.
    """
    if holds is not None and _git(folder, "ls-files", "--error-unmatch", holds) is None:
        return Revision()
    # Untracked files do not count, because the results folder would make every second run dirty.
    state = _git(folder, "describe", "--always", "--exclude=*", "--abbrev=64", "--dirty")
    if state is None:
        return Revision()
    commit, _, dirty = state.partition("-")
    return Revision(commit, bool(dirty))


def _git(folder: Path, *args: str) -> str | None:
    # Without its optional locks this command cannot block a git command of the user's.
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
#: Shares of the cores' time need at least this long, since it is counted in ticks of 10 ms.
_MIN_ELAPSED_S = 0.2
#: Kinds of CPU time in which a core is busy.
_BUSY = ("user", "nice", "system", "irq", "softirq")


def host_facts(device: torch.device) -> Host:
    """The `environment.host` of a run's record: the machine and its two speed scores.

    Takes about 30 ms and synchronizes.
    """
    return Host(
        hostname=platform.node() or None,
        system=platform.platform(),
        cpu_model=_proc_field("/proc/cpuinfo", "model name", "Model", "cpu model") or platform.processor() or None,
        core_count=os.cpu_count(),
        affinity=_usable_cores(),
        memory_total_bytes=psutil.virtual_memory().total,
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


class HostReading(NamedTuple):
    """The kernel's counters at one moment, in seconds since an arbitrary start.

    Attributes:
        read_at_s: the moment.
        cores: number of cores that this process may use.
        busy_s: their busy time.
        stolen_s: their time that the hypervisor gave to other machines.
        own_s: CPU time of this process and its descendants, such as a loader's workers.
        waited_s: time in which this thread was ready to run and had no core; None where the system does not tell.
    """

    read_at_s: float
    cores: int
    busy_s: float
    stolen_s: float
    own_s: float
    waited_s: float | None


def read_host() -> HostReading:
    """Read the counters; takes about a millisecond."""
    usable = _usable_cores() or list(range(os.cpu_count() or 1))
    by_core = psutil.cpu_times(percpu=True)
    cores = [by_core[core]._asdict() for core in usable if core < len(by_core)]
    this_process, own_s, waited_s = psutil.Process(), 0.0, None
    # Other ranks on this host count as own processes too: one launcher is the parent of them all.
    launcher = this_process.parent() if "LOCAL_RANK" in os.environ else None
    for process in {this_process, *(launcher or this_process).children(recursive=True)}:
        with suppress(psutil.Error):
            # User and system time of the process and of its children that have ended.
            own_s += sum(process.cpu_times()[:4])
    with suppress(OSError, IndexError, ValueError):
        text = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
        waited_s = int(text.split()[1]) * 1e-9
    busy_s = sum(core.get(kind, 0.0) for core in cores for kind in _BUSY)
    stolen_s = sum(core.get("steal", 0.0) for core in cores)
    return HostReading(time.perf_counter(), len(usable), busy_s, stolen_s, own_s, waited_s)


def _usable_cores() -> list[int] | None:
    """Cores that this process may run on; None where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def host_state(opened: HostReading, closed: HostReading) -> HostState:
    """The `host_state` of a run's record, from readings at the window's start and end.

    `other_cpu_fraction` and `steal_fraction` are shares of the time of all cores, `waited_fraction` of the window. They
    are None for a window of less than 0.2 s.
    """
    elapsed_s = closed.read_at_s - opened.read_at_s
    state = HostState(load_per_core=load_per_core())
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


@cache
def _nvml_queries() -> dict[str, Values]:
    """The tables of nvml.toml, which documents them."""
    return tomllib.loads(Path(__file__).with_name("nvml.toml").read_text())


class DeviceSensor:
    """Reads properties and state of a device by NVML.

    NVML numbers the machine's GPUs in another order than CUDA_VISIBLE_DEVICES. So the device is found by its UUID or
    its PCI address, never by its index.

    Args:
        device: the device, as PyTorch numbers it.
    """

    def __init__(self, device: torch.device) -> None:
        import pynvml  # type: ignore[import-untyped]

        self._nvml: Any = pynvml
        self._gpu = _torch_facts(device) if device.type == "cuda" else None
        self._handle = _find(pynvml, self._gpu) if self._gpu is not None else None

    def facts(self) -> Gpu:
        """The `environment.gpu` of a run's record: properties by NVML, or else by PyTorch where it knows them."""
        gpu, mig = self._gpu or Gpu(), self._query("MigMode")
        for name, query in _nvml_queries()["gpu"].items():
            setattr(gpu, name, self._query(*query) or getattr(gpu, name))
        gpu.is_mig = None if mig is None else bool(mig[0])
        return gpu

    def read(self) -> DeviceReading:
        """The state of the device now; takes about a millisecond."""
        # Read energy and time next to each other, since mean power is their quotient.
        energy_j, read_at_s = self._query("TotalEnergyConsumption", scale=1e-3), time.monotonic()
        reasons, processes = self._query("CurrentClocksThrottleReasons"), self._query("ComputeRunningProcesses")
        names = _nvml_queries()["throttle_reasons"].items()
        pids = None if processes is None else [process.pid for process in processes]
        other_pids, other_count = other_processes(pids, torch.cuda.is_initialized())
        return DeviceReading(
            read_at_s=read_at_s,
            energy_j=energy_j,
            throttle_reasons=None if reasons is None else [name for bit, name in names if reasons & int(bit)],
            other_process_pids=other_pids,
            other_process_count=other_count,
            **{name: self._query(*query) for name, query in _nvml_queries()["reading"].items()},
        )

    def _query(self, function: str, constant: str = "", part: str = "", scale: float = 0.0) -> Any:
        """The answer of NVML about this device; None where card or driver do not support the query.

        Args:
            function: name of the NVML function, without its beginning `nvmlDeviceGet`.
            constant: name of the NVML constant to pass as an argument, if any.
            part: attribute of the answer to return instead of the answer.
            scale: factor on the answer; 0 for none.
        """
        if self._handle is None:
            return None
        try:
            arguments = [getattr(self._nvml, constant)] if constant else []
            answer = getattr(self._nvml, f"nvmlDeviceGet{function}")(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None
        answer = getattr(answer, part) if part else answer
        return answer * scale if scale else answer

    def driver(self) -> str | None:
        """Version of the NVIDIA driver; None without one."""
        try:
            return str(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError:
            return None


def other_processes(pids: list[int] | None, has_context: bool) -> tuple[list[int] | None, int | None]:
    """Process ids and number of the other processes on the GPU; None where the driver does not tell.

    In a container NVML's list may be empty, or hold the host's process ids. Then other processes can be counted at
    best, not named.

    Args:
        pids: NVML's list of process ids; None where it has none.
        has_context: whether this process uses the GPU and so belongs in the list.
    """
    if pids is None:
        return None, None
    pid = os.getpid()
    if pid in pids or not has_context:
        others = sorted(set(pids) - {pid})
        return others, len(others)
    return None, len(pids) - 1 if pids else None


def derive_device_state(opened: DeviceReading, closed: DeviceReading, wall_s: float | None = None) -> DeviceState:
    """The `device_state` of a run's record, from two readings.

    Args:
        opened: reading at the window's start.
        closed: reading at the window's end.
        wall_s: length of the window, to which the energy is scaled; None takes the time between the readings.
    """
    elapsed_s = (closed.read_at_s or 0.0) - (opened.read_at_s or 0.0)

    def rate(name: str, most: float = math.inf) -> float | None:
        # A counter that ran backwards was reset, because the driver was loaded anew: its difference has no meaning. A
        # counter that moves in steps can be one step ahead of the clock, hence `most`.
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
    # Some PyTorch versions lack some of these attributes.
    domain, bus, slot = (getattr(facts, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    return Gpu(
        name=facts.name,
        uuid=f"GPU-{str(facts.uuid).removeprefix('GPU-')}",
        pci_bus_id=f"{domain:08x}:{bus:02x}:{slot:02x}.0",
        compute_capability=f"{facts.major}.{facts.minor}",
        memory_total_bytes=facts.total_memory,
    )


def _find(nvml: Any, gpu: Gpu) -> Any:
    """NVML's handle of a GPU; None without NVML's library or driver."""
    for find, name in (
        (nvml.nvmlDeviceGetHandleByUUID, gpu.uuid),
        (nvml.nvmlDeviceGetHandleByUUID, str(gpu.uuid).replace("GPU", "MIG", 1)),
        (nvml.nvmlDeviceGetHandleByPciBusId, gpu.pci_bus_id),
    ):
        with suppress(nvml.NVMLError):
            nvml.nvmlInit()
            return find(name)
    return None
