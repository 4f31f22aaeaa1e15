"""What a device attains at best: matrix products in short bursts and held for seconds, and copies in its memory.

A datasheet's peak is at the boost clock; a power-capped card falls below it within seconds, so a burst flatters a
training run and the sustained rate is what it can reach. Both are measured with the clock and the power they ran at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise

import msgspec
import torch

from lmbench.instruments.clock import make_clock, synchronize
from lmbench.instruments.device_state import DeviceSensor, derive_device_state
from lmbench.instruments.environment import capture_environment
from lmbench.kernels.ceiling import CeilingRecord, Rate
from lmbench.progress import progress
from lmbench.records.environment import Environment
from lmbench.records.measured import DeviceReading, DeviceState

#: Edge of the square matrices: large enough that launching and filling the device cost nothing.
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 2**31, "cpu": 2**27}
BURST_S = 0.04
BURSTS = 5
#: Between bursts the card cools down and its clock goes up again.
REST_S = 0.5

#: name: (data type, float32 matmul precision)
MATMULS: dict[str, tuple[torch.dtype, str]] = {
    "bf16": (torch.bfloat16, "highest"),
    "fp16": (torch.float16, "highest"),
    "tf32": (torch.float32, "high"),
    "fp32": (torch.float32, "highest"),
}


def measure_ceiling(sustained_s: float) -> CeilingRecord:
    """The rates of every kind of work on this process's device, each held for that many seconds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = list(MATMULS) if device.type == "cuda" else ["bf16", "fp32"]
    rates = []
    with progress("ceiling", len(names) + 1, is_measured_here=True) as task:
        for name in names:
            task.begin(name)
            rates.append(matmul_rate(name, device, sustained_s))
        task.begin("copy")
        rates.append(copy_rate(device, sustained_s))
    environment = msgspec.convert(capture_environment(device), Environment)
    return CeilingRecord(1, datetime.now(UTC).isoformat(timespec="seconds"), environment, rates)


def matmul_rate(name: str, device: torch.device, sustained_s: float) -> Rate:
    """The rate of products of square matrices in one of MATMULS."""
    dtype, precision = MATMULS[name]
    size = MATMUL_SIZE[device.type]
    with _matmul_precision(precision):
        # Random values: a matrix of zeros takes less power and is faster.
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        return measure_rate(name, lambda: torch.matmul(a, b, out=out), 2.0 * size**3, device, sustained_s)


def copy_rate(device: torch.device, sustained_s: float) -> Rate:
    """The rate at which the device's memory is read and written."""
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    moved = 2.0 * source.numel() * source.element_size()
    return measure_rate("copy", lambda: target.copy_(source), moved, device, sustained_s)


def measure_rate(
    name: str, work: Callable[[], object], amount: float, device: torch.device, sustained_s: float
) -> Rate:
    """The rate of work that does `amount` a call: in bursts, then without a pause."""
    for _ in range(3):
        work()
    once_s = _seconds(work, 3, device) / 3
    calls = max(1, round(BURST_S / once_s))
    bursts = []
    for _ in range(BURSTS):
        time.sleep(REST_S if device.type == "cuda" else 0)
        bursts.append(calls * amount / _seconds(work, calls, device))
    groups, total_s, state = _hold(work, calls, device, sustained_s)
    return Rate(
        name=name,
        burst_per_s=max(bursts),
        bursts=BURSTS,
        burst_s=BURST_S,
        sustained_per_s=amount * calls * groups / total_s,
        seconds=total_s,
        sm_clock_hz=state.close.sm_clock_hz,
        mean_power_w=state.mean_power_w,
        power_capped_fraction=state.power_capped_fraction,
    )


def _seconds(work: Callable[[], object], calls: int, device: torch.device) -> float:
    """Device seconds that `calls` calls in a row take."""
    clock = make_clock("events", device)
    synchronize(device)
    start = clock.stamp()
    for _ in range(calls):
        work()
    end = clock.stamp()
    synchronize(device)
    return clock.seconds(start, end)


def _hold(
    work: Callable[[], object], calls: int, device: torch.device, seconds: float
) -> tuple[int, float, DeviceState]:
    """How many groups of `calls` calls the device did in `seconds` without a pause, how long they took, and the state
    of the device at both ends."""
    clock, sensor = make_clock("events", device), DeviceSensor(device)
    synchronize(device)
    opened, started = sensor.read(), time.perf_counter()
    stamps = [clock.stamp()]
    while time.perf_counter() - started < seconds:
        for _ in range(calls):
            work()
        stamps.append(clock.stamp())
        # Two groups in the queue keep the device busy; without a bound the host would run minutes ahead.
        while len(stamps) > 2 and not clock.is_reached(stamps[-3]):
            time.sleep(0.001)
    # While the device is still at work: an idle clock says nothing.
    closed = sensor.read()
    synchronize(device)
    total_s = sum(clock.seconds(start, end) for start, end in pairwise(stamps))
    state = msgspec.convert(derive_device_state(opened, closed), DeviceState)
    state.close = msgspec.convert(closed, DeviceReading)
    return len(stamps) - 1, total_s, state


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
