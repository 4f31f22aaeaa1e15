"""The sensor of AMD's GPUs: their facts and their state by amdsmi, AMD's management library, which ROCm brings along.

Functions, keys and units are those of py-interface/amdsmi_interface.py (ROCm/amdsmi, ROCm 6 and 7). No run on a card of
AMD's has tried them. A figure that the card or the driver does not give is None; without amdsmi all of them are.
"""

from __future__ import annotations

import time
from operator import attrgetter
from typing import Any

import torch

from lmbench.device.sensor import Sensor, other_processes
from lmbench.records.measured import DeviceReading
from lmbench.records.run import GpuFacts


class AmdSensor(Sensor):
    """Reads properties and state of a GPU by amdsmi, which is asked for the GPU at the same PCI address.

    Args:
        gpu: what PyTorch knows of the GPU.
    """

    def __init__(self, gpu: GpuFacts) -> None:
        self._gpu, self._handle = gpu, None
        try:
            import amdsmi  # type: ignore[import-not-found]
        except (ImportError, KeyError, OSError):
            # Its wrapper looks for the shared library as it is imported.
            gpu.sensor_reason = "amdsmi, AMD's management library, is not installed"
            return
        self._amdsmi = amdsmi
        try:
            amdsmi.amdsmi_init()
            for handle in amdsmi.amdsmi_get_processor_handles():
                # PyTorch's address has eight digits of the domain, amdsmi's has four.
                if str(gpu.pci_bus_id).endswith(amdsmi.amdsmi_get_gpu_device_bdf(handle).lower()):
                    self._handle = handle
        except amdsmi.AmdSmiException as error:
            gpu.sensor_reason = f"amdsmi: {error}"
            return
        if self._handle is None:
            gpu.sensor_reason = f"amdsmi knows no GPU at {gpu.pci_bus_id}"

    def facts(self) -> GpuFacts:
        """The `environment.gpu` of a run's record: properties by amdsmi, or else by PyTorch where it knows them."""
        gpu, board, cap = self._gpu, self._ask("gpu_board_info"), self._ask("power_cap_info")
        gpu.uuid = self._ask("gpu_device_uuid") or gpu.uuid
        gpu.sku = board and board.get("model_number")
        # Microwatts.
        gpu.power_limit_w = _number(cap, "power_cap", scale=1e-6)
        gpu.power_limit_default_w = _number(cap, "default_power_cap", scale=1e-6)
        gpu.max_sm_clock_hz = _number(self._ask("clock_info", "AmdSmiClkType.GFX"), "max_clk", scale=1e6)
        return gpu

    def read(self) -> DeviceReading:
        # Read energy and time next to each other, since mean power is their quotient.
        energy, read_at_s = self._ask("energy_count"), time.monotonic()
        # Microjoules in a step of the counter.
        step_j = _number(energy, "counter_resolution", scale=1e-6) or 0.0
        processes = self._ask("gpu_process_list")
        pids = None if processes is None else [process["pid"] for process in processes]
        other_pids, other_count = other_processes(pids, torch.cuda.is_initialized())
        return DeviceReading(
            read_at_s=read_at_s,
            energy_j=_number(energy, "energy_accumulator", "power", scale=step_j),
            sm_clock_hz=_number(self._ask("clock_info", "AmdSmiClkType.GFX"), "clk", scale=1e6),
            memory_clock_hz=_number(self._ask("clock_info", "AmdSmiClkType.MEM"), "clk", scale=1e6),
            temperature_c=_number(
                self._ask("temp_metric", "AmdSmiTemperatureType.HOTSPOT", "AmdSmiTemperatureMetric.CURRENT")
            ),
            power_w=_number(self._ask("power_info"), "socket_power", "current_socket_power", "average_socket_power"),
            memory_used_bytes=self._ask("gpu_memory_usage", "AmdSmiMemoryType.VRAM"),
            other_process_pids=other_pids,
            other_process_count=other_count,
        )

    def driver(self) -> str | None:
        answer = self._ask("gpu_driver_info")
        return answer and str(answer["driver_version"])

    def _ask(self, function: str, *constants: str) -> Any:
        """The answer of `amdsmi_get_<function>` about this GPU; None where card or driver do not support the query."""
        if self._handle is None:
            return None
        try:
            ask = getattr(self._amdsmi, f"amdsmi_get_{function}")
            return ask(self._handle, *(attrgetter(constant)(self._amdsmi) for constant in constants))
        except (self._amdsmi.AmdSmiException, AttributeError):
            return None


def _number(answer: Any, *keys: str, scale: float = 1.0) -> float | None:
    """A number that is the answer, or the first one under some keys, in the field's unit; `N/A` is none."""
    values = [answer.get(key) for key in keys] if isinstance(answer, dict) else [answer]
    return next((value * scale for value in values if isinstance(value, int | float)), None)
