"""What the GPU is and how it stands, by NVML: clocks, temperature, power, energy, caps, other processes.

Every figure the card or driver does not give is None; without NVML, or on a CPU, all of them are.
"""

from __future__ import annotations

import os
import time
from functools import cache
from typing import TYPE_CHECKING, Any

from lmbench.records.environment import Gpu
from lmbench.records.measured import DeviceReading, DeviceState

if TYPE_CHECKING:
    import torch

#: Names of the bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h). Idle is left out: it caps nothing.
_THROTTLE_REASONS = {
    0x2: "applications clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
}


class DeviceSensor:
    """Reads the device that PyTorch calls `device`.

    NVML counts all GPUs of the machine in another order than CUDA_VISIBLE_DEVICES shows them, so the device
    is found by its UUID or its PCI address, never by its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nvml = _load_nvml() if device.type == "cuda" else None
        self._handle = _find(self._nvml, device) if self._nvml is not None else None

    def facts(self) -> Gpu:
        """What does not change.

        Where NVML does not answer, PyTorch does for what it knows.
        """
        ask = self._ask
        capability = ask("nvmlDeviceGetCudaComputeCapability")
        mig = ask("nvmlDeviceGetMigMode")
        known = _torch_facts(self._device) if self._device.type == "cuda" else Gpu()
        return Gpu(
            name=ask("nvmlDeviceGetName") or known.name,
            uuid=ask("nvmlDeviceGetUUID") or known.uuid,
            sku=ask("nvmlDeviceGetBoardPartNumber"),
            pci_bus_id=_part(ask("nvmlDeviceGetPciInfo"), "busId") or known.pci_bus_id,
            compute_capability=".".join(map(str, capability)) if capability else known.compute_capability,
            memory_total_bytes=_part(ask("nvmlDeviceGetMemoryInfo"), "total") or known.memory_total_bytes,
            power_limit_w=_scaled(ask("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
            power_limit_default_w=_scaled(ask("nvmlDeviceGetPowerManagementDefaultLimit"), 1e-3),
            max_sm_clock_hz=_scaled(self._clock("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"), 1e6),
            is_mig=None if mig is None else bool(mig[0]),
        )

    def read(self) -> DeviceReading:
        """How the device stands now. Takes about a millisecond."""
        ask = self._ask
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        # Beside the energy counter, since mean power is their quotient.
        energy, read_at = ask("nvmlDeviceGetTotalEnergyConsumption"), time.monotonic()
        reading = DeviceReading(
            read_at_s=read_at,
            energy_j=_scaled(energy, 1e-3),
            power_capped_s=self._capped("NVML_PERF_POLICY_POWER"),
            thermal_capped_s=self._capped("NVML_PERF_POLICY_THERMAL"),
            sm_clock_hz=_scaled(self._clock("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"), 1e6),
            memory_clock_hz=_scaled(self._clock("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"), 1e6),
            temperature_c=self._clock("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
            power_w=_scaled(ask("nvmlDeviceGetPowerUsage"), 1e-3),
            throttle_reasons=None if reasons is None else _names(reasons),
            memory_used_bytes=_part(ask("nvmlDeviceGetMemoryInfo"), "used"),
        )
        processes = ask("nvmlDeviceGetComputeRunningProcesses")
        pids = None if processes is None else [process.pid for process in processes]
        reading.other_process_pids, reading.other_process_count = other_processes(pids, _has_context())
        return reading

    def _ask(self, function: str, *args: object) -> Any:
        """The answer of an NVML function about this device, None where card or driver do not have it."""
        if self._nvml is None or self._handle is None:
            return None
        try:
            return getattr(self._nvml, function)(self._handle, *args)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def _clock(self, function: str, kind: str) -> Any:
        return self._ask(function, getattr(self._nvml, kind, None))

    def _capped(self, policy: str) -> float | None:
        # Nanoseconds since the driver was loaded (nvml.h, nvmlViolationTime_t).
        status = self._ask("nvmlDeviceGetViolationStatus", getattr(self._nvml, policy, None))
        return _scaled(_part(status, "violationTime"), 1e-9)

    def driver(self) -> str | None:
        """Version of the NVIDIA driver."""
        if self._nvml is None:
            return None
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
    own = os.getpid()
    if own in pids or not has_context:
        others = sorted(set(pids) - {own})
        return others, len(others)
    return None, len(pids) - 1 if pids else None


def derive_device_state(opened: DeviceReading, closed: DeviceReading, wall_s: float | None = None) -> DeviceState:
    """What two readings say of the time between them.

    `wall_s` is the window's length, to which the energy is scaled; without it the energy is that between the
    readings.
    """
    elapsed_s = (closed.read_at_s or 0.0) - (opened.read_at_s or 0.0)
    power_w = _rate(opened.energy_j, closed.energy_j, elapsed_s)
    counts = [reading.other_process_count for reading in (opened, closed)]
    known = [count for count in counts if count is not None]
    return DeviceState(
        open=opened,
        close=closed,
        mean_power_w=power_w,
        mean_temperature_c=_mean(opened.temperature_c, closed.temperature_c),
        energy_j=None if power_w is None else power_w * (elapsed_s if wall_s is None else wall_s),
        power_capped_fraction=_share(opened.power_capped_s, closed.power_capped_s, elapsed_s),
        thermal_capped_fraction=_share(opened.thermal_capped_s, closed.thermal_capped_s, elapsed_s),
        sm_clock_drop_fraction=_drop(opened.sm_clock_hz, closed.sm_clock_hz),
        other_process_count=max(known, default=None),
    )


def _rate(before: float | None, after: float | None, elapsed_s: float) -> float | None:
    # A counter that runs backwards was reset in between (the driver was loaded anew): it says nothing.
    if before is None or after is None or after < before or elapsed_s <= 0:
        return None
    return (after - before) / elapsed_s


def _share(before: float | None, after: float | None, elapsed_s: float) -> float | None:
    # The counter moves in steps, and can so be ahead of the clock by one.
    rate = _rate(before, after, elapsed_s)
    return None if rate is None else min(rate, 1.0)


def _mean(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else (before + after) / 2


def _drop(before: float | None, after: float | None) -> float | None:
    return None if not before or after is None else (before - after) / before


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _part(struct: Any, name: str) -> Any:
    return getattr(struct, name, None)


def _names(reasons: int) -> list[str]:
    return [name for bit, name in _THROTTLE_REASONS.items() if reasons & bit]


@cache
def _load_nvml() -> Any:
    """NVML, initialised for the rest of the process; None without its library or driver."""
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _torch_facts(device: torch.device) -> Gpu:
    import torch

    facts = torch.cuda.get_device_properties(device)
    uuid = getattr(facts, "uuid", None)
    return Gpu(
        name=facts.name,
        uuid=None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}",
        pci_bus_id=_pci_address(facts),
        compute_capability=f"{facts.major}.{facts.minor}",
        memory_total_bytes=facts.total_memory,
    )


def _find(nvml: Any, device: torch.device) -> Any:
    import torch

    facts = torch.cuda.get_device_properties(device)
    uuid = str(getattr(facts, "uuid", "")).removeprefix("GPU-")
    attempts = [
        (nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}"),
        (nvml.nvmlDeviceGetHandleByUUID, f"MIG-{uuid}"),
        (nvml.nvmlDeviceGetHandleByPciBusId, _pci_address(facts)),
    ]
    for find, name in attempts:
        try:
            return find(name)
        except nvml.NVMLError:
            continue
    return None


def _pci_address(facts: Any) -> str:
    domain, bus, slot = (getattr(facts, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    return f"{domain:08x}:{bus:02x}:{slot:02x}.0"


def _has_context() -> bool:
    import torch

    cuda: Any = torch.cuda
    return bool(cuda.is_initialized())
