"""The sensor of NVIDIA's GPUs: their facts and their state by NVML, NVIDIA's management library.

A figure that the card or the driver does not give is None; without NVML all of them are.
"""

from __future__ import annotations

import time
import tomllib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from lmbench.device.sensor import Sensor, other_processes
from lmbench.records.measured import DeviceReading
from lmbench.records.run import GpuFacts
from lmbench.records.vocabulary import Values


@cache
def _nvml_queries() -> dict[str, Values]:
    """The tables of nvml.toml, which documents them."""
    return tomllib.loads(Path(__file__).with_name("nvml.toml").read_text())


class NvmlSensor(Sensor):
    """Reads properties and state of a GPU by NVML.

    NVML numbers the machine's GPUs in another order than CUDA_VISIBLE_DEVICES. So the device is found by its UUID or
    its PCI address, never by its index.

    Args:
        gpu: what PyTorch knows of the GPU.
    """

    def __init__(self, gpu: GpuFacts) -> None:
        import pynvml  # type: ignore[import-untyped]

        self._nvml: Any = pynvml
        self._gpu = gpu
        self._handle = _find(pynvml, gpu)

    def facts(self) -> GpuFacts:
        """The `environment.gpu` of a run's record: properties by NVML, or else by PyTorch where it knows them."""
        gpu, mig = self._gpu, self._query("MigMode")
        for name, query in _nvml_queries()["gpu"].items():
            setattr(gpu, name, self._query(*query) or getattr(gpu, name))
        gpu.is_mig = None if mig is None else bool(mig[0])
        if self._handle is None:
            gpu.sensor_reason = "NVML, NVIDIA's management library, is not there or does not know this GPU"
        return gpu

    def read(self) -> DeviceReading:
        # Read energy and time next to each other, since mean power is their quotient.
        energy_j, read_at_s = self._query("TotalEnergyConsumption", scale=1e-3), time.monotonic()
        processes = self._query("ComputeRunningProcesses")
        pids = None if processes is None else [process.pid for process in processes]
        other_pids, other_count = other_processes(pids)
        return DeviceReading(
            read_at_s=read_at_s,
            energy_j=energy_j,
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
        try:
            return str(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError:
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
