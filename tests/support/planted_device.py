"""A third kind of device, which exists only here: a queue of work and a number of bytes, both given by the test."""

from __future__ import annotations

import time
import warnings
from types import SimpleNamespace

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lmbench.device import Device
from lmbench.device.clock import HostClock, SyncClock
from lmbench.device.protocol import SyncDebug
from lmbench.device.sensor import Sensor
from lmbench.records.measured import DeviceReading
from lmbench.records.run import GpuFacts

WARNING = "synchronizing planted operation"


class QueueClock(HostClock):
    """Stamps are the times at which the queue will have come so far."""

    name, has_lag = "events", True

    def __init__(self, device):
        self.device = device

    def stamp(self):
        return max(self.device.busy_until_s, time.perf_counter())

    def seconds(self, start, end):
        return end - start

    def is_reached(self, stamp):
        return time.perf_counter() >= stamp


class Counters:
    """In the place of `torch.cuda`: counts the bytes that a test holds."""

    def __init__(self):
        self.held_bytes = self.peak_bytes = 0

    def hold(self, more_bytes):
        self.held_bytes += more_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def memory_allocated(self, device):
        return self.held_bytes

    def memory_reserved(self, device):
        return 2 * self.held_bytes

    def memory_stats_as_nested_dict(self, device):
        return {"reserved_bytes": {"all": {"current": self.memory_reserved(device)}}}

    def max_memory_allocated(self, device):
        return self.peak_bytes

    def max_memory_reserved(self, device):
        return 2 * self.peak_bytes

    def reset_peak_memory_stats(self, device):
        self.peak_bytes = self.held_bytes

    def memory_stats(self, device):
        return {"num_alloc_retries": 3}

    def get_device_properties(self, device):
        return SimpleNamespace(total_memory=1 << 20)


class Meter(Sensor):
    """A card that draws 100 W."""

    def facts(self):
        return GpuFacts(name="Planted Card")

    def read(self):
        now_s = time.monotonic()
        return DeviceReading(read_at_s=now_s, energy_j=100.0 * now_s)

    def driver(self):
        return "planted 1.0"


class PlantedDevice(Device):
    """Works through a queue while the host goes on, as a GPU does. Registered as a function that returns it."""

    def __init__(self, device=None):
        super().__init__(device or torch.device("cpu"))
        self.counters = Counters()
        self.busy_until_s = 0.0
        self.sync_mode = "default"
        self.sync_debug = SyncDebug(lambda mode: setattr(self, "sync_mode", mode), WARNING)

    def give(self, work_s):
        """Queue work that takes so long."""
        self.busy_until_s = max(self.busy_until_s, time.perf_counter()) + work_s

    def wait(self):
        """Wait inside an operator, as `.item()` does."""
        if self.sync_mode == "warn":
            warnings.warn(f"called a {WARNING}", stacklevel=2)
        self.synchronize()

    @staticmethod
    def is_available():
        return True

    def name(self):
        return "Planted Card"

    def synchronize(self):
        time.sleep(max(0.0, self.busy_until_s - time.perf_counter()))

    def clock(self, name):
        return QueueClock(self) if name == "events" else SyncClock(self.synchronize)

    def watch_refusals(self, listener):
        self.listener = listener

    def sensor(self):
        return Meter()


class OnMeta(SingleDeviceStrategy):
    """Trains on what PyTorch calls `meta`, a device that any machine has; the tensors stay where they are."""

    def __init__(self):
        super().__init__(torch.device("meta"))

    def setup_environment(self):
        pass

    def model_to_device(self):
        pass

    def batch_to_device(self, batch, device=None, dataloader_idx=0):
        return batch
