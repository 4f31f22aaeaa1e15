"""GPUs that PyTorch calls `cuda`: NVIDIA's by CUDA, and AMD's by ROCm."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from weakref import WeakMethod

import torch
from torch.profiler import ProfilerActivity

from lmbench.device.amd import AmdSensor
from lmbench.device.clock import HostClock, SyncClock
from lmbench.device.history import History
from lmbench.device.nvml import NvmlSensor
from lmbench.device.protocol import Device, Refused, SyncDebug
from lmbench.device.sensor import Sensor
from lmbench.records.run import GpuFacts

#: The first compute capability with fp8 matrix units (Ada).
_FP8_CAPABILITY = (8, 9)
#: Events made before the window: those of 50 steps, after which the timer reads them, with 20 borders in each.
_EVENTS = 1000


class EventClock(HostClock):
    """CUDA events on the stream that was current when the clock was made, read after the device has passed them."""

    name = "events"
    has_lag = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._free = [torch.cuda.Event(enable_timing=True) for _ in range(_EVENTS)]
        # The first record of an event creates its CUDA object: record here, not first in the window.
        for event in self._free:
            event.record(self._stream)

    def stamp(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Device seconds between two reached stamps, in float32 milliseconds: accurate between neighbours only."""
        return float(start.elapsed_time(end)) * 1e-3

    def is_reached(self, stamp: torch.cuda.Event) -> bool:
        return bool(stamp.query())

    def recycle(self, stamps: Iterable[torch.cuda.Event]) -> None:
        self._free.extend(stamps)


_listener: list[WeakMethod[Refused]] = []


def _observed(device: int, requested_bytes: int, device_total_bytes: int, device_free_bytes: int) -> None:
    listener = _listener[0]()
    if listener is not None:
        with suppress(Exception):
            listener(device, requested_bytes, device_free_bytes)


class Cuda(Device):
    """A GPU of NVIDIA or, in a ROCm build of PyTorch, of AMD."""

    pins_memory = True
    counters = torch.cuda
    activities = (ProfilerActivity.CUDA,)
    markers, capture = torch.cuda.nvtx, torch.cuda.profiler
    sync_debug = SyncDebug(torch.cuda.set_sync_debug_mode, "synchronizing CUDA operation")

    @staticmethod
    def is_available() -> bool:
        return torch.cuda.is_available()

    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def clock(self, name: str) -> HostClock:
        if name == "events":
            return EventClock(self.device)
        return SyncClock(self.synchronize)

    def watch_refusals(self, listener: Refused) -> None:
        if not _listener:
            # Attach one observer for good: PyTorch cannot detach it.
            torch._C._cuda_attach_out_of_memory_observer(_observed)  # type: ignore[attr-defined]
        _listener[:] = [WeakMethod(listener)]

    def sensor(self) -> Sensor:
        gpu = _torch_facts(self.device)
        return AmdSensor(gpu) if torch.version.hip else NvmlSensor(gpu)

    def history(self) -> History:
        return History(self.device)

    def why_no_fp8(self) -> str | None:
        if torch.cuda.get_device_capability(self.device) < _FP8_CAPABILITY:
            return f"{self.name()}, which has no fp8 units; they begin with Ada and Hopper (SM 8.9)"
        return None


def _torch_facts(device: torch.device) -> GpuFacts:
    facts = torch.cuda.get_device_properties(device)
    # Some PyTorch versions lack some of these attributes.
    domain, bus, slot = (getattr(facts, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    return GpuFacts(
        name=facts.name,
        uuid=f"GPU-{str(facts.uuid).removeprefix('GPU-')}",
        pci_bus_id=f"{domain:08x}:{bus:02x}:{slot:02x}.0",
        memory_total_bytes=facts.total_memory,
    )
