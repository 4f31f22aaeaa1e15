"""The GPU: its facts and its state at the window's ends, by NVML, NVIDIA's management library.

A figure that the card or the driver does not give is None; without NVML, and on a CPU, all of them are.
"""

from __future__ import annotations

import math
import os
import time
import tomllib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lmbench.records.measured import DeviceReading, DeviceState
from lmbench.records.run import GpuFacts
from lmbench.records.vocabulary import Values


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

    def facts(self) -> GpuFacts:
        """The `environment.gpu` of a run's record: properties by NVML, or else by PyTorch where it knows them."""
        gpu, mig = self._gpu or GpuFacts(), self._query("MigMode")
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


def _torch_facts(device: torch.device) -> GpuFacts:
    facts = torch.cuda.get_device_properties(device)
    # Some PyTorch versions lack some of these attributes.
    domain, bus, slot = (getattr(facts, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    return GpuFacts(
        name=facts.name,
        uuid=f"GPU-{str(facts.uuid).removeprefix('GPU-')}",
        pci_bus_id=f"{domain:08x}:{bus:02x}:{slot:02x}.0",
        compute_capability=f"{facts.major}.{facts.minor}",
        memory_total_bytes=facts.total_memory,
    )


def _find(nvml: Any, gpu: GpuFacts) -> Any:
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
