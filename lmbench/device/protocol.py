"""What measuring asks of a kind of device. Another kind is a class in a file of its own, and an entry in `DEVICES`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch.profiler import ProfilerActivity

from lmbench.device.clock import HostClock
from lmbench.device.history import History
from lmbench.device.sensor import Sensor
from lmbench.records.run import GpuFacts

#: A method that is called with the device's index, the requested bytes, and the bytes that are free on the device.
Refused = Callable[[int, int, int], None]


class SyncDebug(NamedTuple):
    """A mode in which PyTorch warns of operators that make the host wait.

    Attributes:
        set_mode: called with `warn` or `default`.
        warning: the part of a warning by which it is known.
    """

    set_mode: Callable[[str], None]
    warning: str


class Device(Protocol):
    """One device of some kind; a kind says only what it has besides the host's clock.

    It is asked when a run starts or a window ends. The clock is handed out once a run, so that a mark costs no call
    through this protocol.

    Attributes:
        device: the device, as PyTorch names it.
        pins_memory: whether copies from pinned memory run beside the host.
        activities: what torch.profiler records of the device.
        markers: a module with `range_push` and `range_pop`, which the vendor's profiler sees; None without one.
        capture: a module with `start` and `stop`, between which the vendor's profiler records; None without one.
        sync_debug: the debug mode for synchronizes; None without one.
        counters: a module with the counters of the caching allocator, `memory_allocated(device)`, `memory_reserved`,
            `memory_stats` and the others that `torch.cuda` and `torch.xpu` have; None without an allocator.
    """

    device: torch.device
    pins_memory: bool = False
    activities: tuple[ProfilerActivity, ...] = ()
    markers: ModuleType | None = None
    capture: ModuleType | None = None
    sync_debug: SyncDebug | None = None
    counters: Any = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @staticmethod
    @abstractmethod
    def is_available() -> bool:
        """Whether this machine has such a device."""

    @abstractmethod
    def name(self) -> str:
        """What the vendor calls the device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished its work."""

    @abstractmethod
    def clock(self, name: str) -> HostClock:
        """The clock called `name`, `events` or `sync`."""

    def watch_refusals(self, listener: Refused) -> None:
        """Call a method whenever memory is refused to the allocator; it replaces the method of an earlier call.

        The method is called before the exception is raised, while all memory is still held; its own errors are ignored.
        Its object is not kept alive: that would keep a Trainer, and the Trainer's memory on the device. Without an
        allocator it is never called.
        """
        return None

    def sensor(self) -> Sensor:
        """The sensor of the device's state; by default the device's name is all that it knows."""
        return Sensor(GpuFacts(name=self.name()))

    def history(self) -> History | None:
        """The history of the caching allocator, not yet started; None where PyTorch keeps none."""
        return None

    def why_no_fp8(self) -> str | None:
        """The device's name and why it has no fp8; None where products of fp8 are computed, if only by emulation."""
        return None
