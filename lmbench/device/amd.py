"""The sensor of AMD's GPUs: their facts and their state by amdsmi, AMD's management library, which ROCm brings along.

Functions, keys and units are those of py-interface/amdsmi_interface.py (ROCm/amdsmi, ROCm 6.4). No run on a card of
AMD's has tried them. A figure that the card or the driver does not give is None; without amdsmi all of them are.
"""

from __future__ import annotations

import time
from operator import attrgetter
from typing import Any

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

            amdsmi.amdsmi_init()
            handles = {amdsmi.amdsmi_get_gpu_device_bdf(card): card for card in amdsmi.amdsmi_get_processor_handles()}
            # PyTorch's address has eight digits of the domain, amdsmi's has four.
            self._amdsmi, self._handle = amdsmi, handles[str(gpu.pci_bus_id)[4:]]
        except Exception as error:
            # The library's own errors, and those of its import, which looks for ROCm's folder and shared library.
            gpu.sensor_reason = f"amdsmi, AMD's management library, cannot be asked about this GPU: {error!r}"

    def facts(self) -> GpuFacts:
        """The `environment.gpu` of a run's record: properties by amdsmi, or else by PyTorch where it knows them."""
        gpu = self._gpu
        gpu.uuid = self._ask("gpu_device_uuid") or gpu.uuid
        gpu.sku = self._ask("gpu_board_info", part="model_number")
        # Microwatts.
        gpu.power_limit_w = self._ask("power_cap_info", part="power_cap", scale=1e-6)
        return gpu

    def read(self) -> DeviceReading:
        # Read energy and time next to each other, since mean power is their quotient.
        ticks, read_at_s = self._ask("energy_count", part="energy_accumulator"), time.monotonic()
        # Microjoules in a tick of the counter.
        tick_j = self._ask("energy_count", part="counter_resolution", scale=1e-6)
        processes = self._ask("gpu_process_list")
        pids = None if processes is None else [process["pid"] for process in processes]
        other_pids, other_count = other_processes(pids)
        return DeviceReading(
            read_at_s=read_at_s,
            energy_j=None if ticks is None or tick_j is None else ticks * tick_j,
            sm_clock_hz=self._ask("clock_info", "AmdSmiClkType.GFX", part="clk", scale=1e6),
            temperature_c=self._ask("temp_metric", "AmdSmiTemperatureType.HOTSPOT", "AmdSmiTemperatureMetric.CURRENT"),
            power_w=self._ask("power_info", part="socket_power"),
            other_process_pids=other_pids,
            other_process_count=other_count,
        )

    def driver(self) -> str | None:
        version: str | None = self._ask("gpu_driver_info", part="driver_version")
        return version

    def _ask(self, function: str, *constants: str, part: str = "", scale: float = 0.0) -> Any:
        """The answer of amdsmi about this GPU; None where card or driver do not support the query.

        Args:
            function: name of amdsmi's function, without its beginning `amdsmi_get_`.
            constants: names of amdsmi's constants to pass as arguments.
            part: key of the answer to return instead of the answer.
            scale: factor on the answer; 0 for none.
        """
        if self._handle is None:
            return None
        try:
            ask = getattr(self._amdsmi, f"amdsmi_get_{function}")
            answer = ask(self._handle, *(attrgetter(constant)(self._amdsmi) for constant in constants))
            answer = answer[part] if part else answer
        except (self._amdsmi.AmdSmiException, AttributeError, KeyError):
            return None
        if answer == "N/A":
            return None
        return answer * scale if scale else answer
