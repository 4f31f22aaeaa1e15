"""The sensor of AMD's GPUs: their facts and their state by amdsmi, AMD's management library, which ROCm brings along.

Functions, keys and units are those of py-interface/amdsmi_interface.py (ROCm/amdsmi, ROCm 6.4). No run on a card of
AMD's has tried them.
"""

from __future__ import annotations

from lmbench.device.sensor import LibrarySensor
from lmbench.records.run import GpuFacts


class AmdSensor(LibrarySensor):
    """Reads properties and state of a GPU by amdsmi, which is asked for the GPU at the same PCI address.

    Args:
        gpu: what PyTorch knows of the GPU.
    """

    prefix, table = "amdsmi_get_", "amd.toml"

    def __init__(self, gpu: GpuFacts) -> None:
        super().__init__(gpu)
        try:
            import amdsmi  # type: ignore[import-not-found]

            amdsmi.amdsmi_init()
            handles = {amdsmi.amdsmi_get_gpu_device_bdf(card): card for card in amdsmi.amdsmi_get_processor_handles()}
            # PyTorch's address has eight digits of the domain, amdsmi's has four.
            handle = handles[str(gpu.pci_bus_id)[4:]]
            self._library, self._error, self._handle = amdsmi, amdsmi.AmdSmiException, handle
        except Exception as error:
            # The library's own errors, and those of its import, which looks for ROCm's folder and shared library.
            gpu.sensor_reason = f"amdsmi, AMD's management library, cannot be asked about this GPU: {error!r}"

    def _energy_j(self) -> float | None:
        ticks = self._query("energy_count", part="energy_accumulator")
        tick_j = self._query("energy_count", part="counter_resolution", scale=1e-6)
        return None if ticks is None or tick_j is None else float(ticks * tick_j)

    def _pids(self) -> list[int] | None:
        processes = self._query("gpu_process_list")
        return None if processes is None else [process["pid"] for process in processes]

    def driver(self) -> str | None:
        version: str | None = self._query("gpu_driver_info", part="driver_version")
        return version
