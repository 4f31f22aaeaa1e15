"""The sensor of NVIDIA's GPUs: their facts and their state by NVML, NVIDIA's management library."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from lmbench.device.sensor import LibrarySensor
from lmbench.records.run import GpuFacts


class NvmlSensor(LibrarySensor):
    """Reads properties and state of a GPU by NVML.

    NVML numbers the machine's GPUs in another order than CUDA_VISIBLE_DEVICES. So the device is found by its UUID or
    its PCI address, never by its index.

    Args:
        gpu: what PyTorch knows of the GPU.
    """

    prefix, table = "nvmlDeviceGet", "nvml.toml"

    def __init__(self, gpu: GpuFacts) -> None:
        import pynvml  # type: ignore[import-untyped]

        super().__init__(gpu)
        self._library, self._error, self._handle = pynvml, pynvml.NVMLError, _find(pynvml, gpu)
        if self._handle is None:
            gpu.sensor_reason = "NVML, NVIDIA's management library, is not there or does not know this GPU"

    def facts(self) -> GpuFacts:
        gpu, mig = super().facts(), self._query("MigMode")
        gpu.is_mig = None if mig is None else bool(mig[0])
        return gpu

    def _energy_j(self) -> float | None:
        energy_j: float | None = self._query("TotalEnergyConsumption", scale=1e-3)
        return energy_j

    def _pids(self) -> list[int] | None:
        processes = self._query("ComputeRunningProcesses")
        return None if processes is None else [process.pid for process in processes]

    def driver(self) -> str | None:
        with suppress(self._error):
            return str(self._library.nvmlSystemGetDriverVersion())
        return None


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
