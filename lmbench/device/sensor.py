"""The state of a device, as its vendor's library tells it, and what two readings say of the window between them."""

from __future__ import annotations

import math
import os
import time
import tomllib
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from lmbench.records.measured import DeviceReading, DeviceState
from lmbench.records.run import GpuFacts
from lmbench.records.vocabulary import Values


class Sensor:
    """The sensor of a device of which no library tells anything: all figures are None but the time.

    Args:
        gpu: what PyTorch knows of the device; None for a CPU.
    """

    def __init__(self, gpu: GpuFacts | None = None) -> None:
        self._gpu = gpu or GpuFacts()

    def facts(self) -> GpuFacts:
        """The `environment.gpu` of a run's record."""
        return self._gpu

    def read(self) -> DeviceReading:
        """The state of the device now; takes about a millisecond."""
        return DeviceReading(read_at_s=time.monotonic())

    def driver(self) -> str | None:
        """Version of the device's driver; None without one."""
        return None


@cache
def _queries(file: str) -> dict[str, Values]:
    """The tables of a vendor's file in this folder, which documents them."""
    return tomllib.loads(Path(__file__).with_name(file).read_text())


class LibrarySensor(Sensor):
    """Reads properties and state of a GPU by its vendor's library.

    A figure that the card or the driver does not give is None; without the library all of them are.

    Attributes:
        prefix: the beginning of the names of the library's functions about one GPU.
        table: the file of the queries whose answers are kept as they are.
    """

    prefix: str
    table: str
    _library: Any
    #: The library's own error where card or driver do not support a query.
    _error: type[Exception]
    #: The library's name for this GPU; None where the library is not there or does not know it.
    _handle: Any = None

    def facts(self) -> GpuFacts:
        """The `environment.gpu` of a run's record: by the library, or else by PyTorch where it knows a property."""
        for name, query in _queries(self.table)["gpu"].items():
            setattr(self._gpu, name, self._query(*query) or getattr(self._gpu, name))
        return self._gpu

    def read(self) -> DeviceReading:
        # Read energy and time next to each other, since mean power is their quotient.
        energy_j, read_at_s = self._energy_j(), time.monotonic()
        other_pids, other_count = other_processes(self._pids())
        return DeviceReading(
            read_at_s=read_at_s,
            energy_j=energy_j,
            other_process_pids=other_pids,
            other_process_count=other_count,
            **{name: self._query(*query) for name, query in _queries(self.table)["reading"].items()},
        )

    @abstractmethod
    def _energy_j(self) -> float | None:
        """Energy since an arbitrary moment."""

    @abstractmethod
    def _pids(self) -> list[int] | None:
        """Process ids on the GPU."""

    def _query(self, function: str, constants: Sequence[str] = (), part: str = "", scale: float = 0.0) -> Any:
        """The library's answer about this GPU; None where card or driver do not support the query.

        Args:
            function: name of the library's function, without `prefix`.
            constants: names of the library's constants to pass as arguments.
            part: attribute or key of the answer to return instead of the answer.
            scale: factor on the answer; 0 for none.
        """
        if self._handle is None:
            return None
        try:
            ask = getattr(self._library, f"{self.prefix}{function}")
            answer = ask(self._handle, *(attrgetter(constant)(self._library) for constant in constants))
            if part:
                answer = answer[part] if isinstance(answer, dict) else getattr(answer, part)
        except (self._error, AttributeError, KeyError):
            return None
        # What amdsmi does not know.
        if answer == "N/A":
            return None
        return answer * scale if scale else answer


def other_processes(pids: list[int] | None) -> tuple[list[int] | None, int | None]:
    """Process ids and number of the other processes on the GPU; None where the driver does not tell.

    In a container NVML's list may be empty, or hold the host's process ids. Then other processes can be counted at
    best, not named.

    Args:
        pids: the library's list of process ids; None where it has none.
    """
    if pids is None:
        return None, None
    pid = os.getpid()
    # A process that uses no GPU is not in the list.
    if pid in pids or not torch.cuda.is_initialized():
        others = sorted(set(pids) - {pid})
        return others, len(others)
    return None, len(pids) - 1 if pids else None


def derive_device_state(opened: DeviceReading, closed: DeviceReading, wall_s: float | None = None) -> DeviceState:
    """The `device_state` of a run's record, from two readings.

    Args:
        opened: reading at the window's start.
        closed: reading at the window's end.
        wall_s: length of the window, to which the energy is scaled; None takes the time between the readings.
    """
    elapsed_s = (closed.read_at_s or 0.0) - (opened.read_at_s or 0.0)

    def rate(name: str, most: float = math.inf) -> float | None:
        # A counter that ran backwards was reset, because the driver was loaded anew: its difference has no meaning. A
        # counter that moves in steps can be one step ahead of the clock, hence `most`.
        before, after = getattr(opened, name), getattr(closed, name)
        if before is None or after is None or after < before or elapsed_s <= 0:
            return None
        per_second: float = (after - before) / elapsed_s
        return min(per_second, most)

    power_w = rate("energy_j")
    state = DeviceState(
        open=opened,
        close=closed,
        mean_power_w=power_w,
        energy_j=None if power_w is None else power_w * (elapsed_s if wall_s is None else wall_s),
        power_capped_fraction=rate("power_capped_s", most=1.0),
        thermal_capped_fraction=rate("thermal_capped_s", most=1.0),
    )
    counts = (opened.other_process_count, closed.other_process_count)
    state.other_process_count = max((count for count in counts if count is not None), default=None)
    if opened.temperature_c is not None and closed.temperature_c is not None:
        state.mean_temperature_c = (opened.temperature_c + closed.temperature_c) / 2
    if opened.sm_clock_hz and closed.sm_clock_hz is not None:
        state.sm_clock_drop_fraction = 1 - closed.sm_clock_hz / opened.sm_clock_hz
    return state
