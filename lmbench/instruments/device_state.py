"""What the GPU is and how it stands, by NVML: clocks, temperature, power, energy, caps, other processes.

Every figure the card or driver does not give is None; without NVML, or on a CPU, all of them are.
"""

from __future__ import annotations

import math
import os
import sys
import time
import tomllib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmbench.records.measured import DeviceReading, DeviceState
from lmbench.records.run import Gpu

if TYPE_CHECKING:
    import torch


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
        # Imported by whoever opened the GPU.
        has_context = "torch" in sys.modules and bool(sys.modules["torch"].cuda.is_initialized())
        pids = None if processes is None else [process.pid for process in processes]
        other_pids, other_count = other_processes(pids, has_context)
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
    import torch

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
