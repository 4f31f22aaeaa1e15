"""GPUs that PyTorch calls `cuda`: NVIDIA's by CUDA, and AMD's by ROCm."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from weakref import WeakMethod

import torch
from torch.profiler import ProfilerActivity

from lmbench.device.amd import AmdSensor
from lmbench.device.clock import HostClock, SyncClock
from lmbench.device.nvml import NvmlSensor
from lmbench.device.protocol import Device, History, Refused, SyncDebug
from lmbench.device.sensor import Sensor
from lmbench.records.run import GpuFacts
from lmbench.records.store import write_whole

#: The first compute capability with fp8 matrix units (Ada).
_FP8_CAPABILITY = (8, 9)
#: Events made before the window: those of 50 steps, after which the timer reads them, with 20 borders in each.
_EVENTS = 1000
#: The latest protocol of pickles that pytorch.org/memory_viz reads.
_PROTOCOL = 4


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


class CudaHistory(History):
    """The history of PyTorch's caching allocator on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, max_entries: int, *, resets_peaks: bool) -> None:
        if resets_peaks:
            torch.cuda.reset_peak_memory_stats(self._device)
        # Record the ranges of all threads: the backward on a CUDA device runs on a thread that Python did not start.
        torch.cuda.memory._record_memory_history(
            "all", "all", "python", max_entries, self._device, clear_history=True, global_record_annotations=True
        )

    def drop_workspaces(self) -> None:
        torch.cuda.synchronize(self._device)
        torch._C._cuda_clearCublasWorkspaces()

    def peaks(self) -> list[int]:
        stats = torch.cuda.memory_stats(self._device)
        names = ("allocated", "requested", "reserved")
        return [stats.get(f"{name}_bytes.all.peak", 0) for name in names]

    def write(self, path: Path) -> None:
        write_whole(path, pickle.dumps(torch.cuda.memory._snapshot(self._device), protocol=_PROTOCOL))

    def stop(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None, device=self._device)


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
        return SyncClock(partial(torch.cuda.synchronize, self.device))

    def watch_refusals(self, listener: Refused) -> None:
        if not _listener:
            # Attach one observer for good: PyTorch cannot detach it.
            torch._C._cuda_attach_out_of_memory_observer(_observed)  # type: ignore[attr-defined]
        _listener[:] = [WeakMethod(listener)]

    def sensor(self) -> Sensor:
        gpu = _torch_facts(self.device)
        return AmdSensor(gpu) if torch.version.hip else NvmlSensor(gpu)

    def history(self) -> History:
        return CudaHistory(self.device)

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
