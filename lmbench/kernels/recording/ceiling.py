"""The best rates of a device: matrix products and copies in its memory, in short bursts and sustained for seconds.

A datasheet's peak is at the boost clock, and a power-capped card falls below it within seconds. So a burst flatters the
device, and a training run can reach the sustained rate at most. The clock and power of each rate are recorded, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import msgspec
import torch

from lmbench.device import best_device, device_of, synchronize
from lmbench.device.sensor import derive_device_state
from lmbench.instruments.environment import capture_environment
from lmbench.kernels.ceiling import CeilingRecord, CollectiveRate, Rate
from lmbench.progress import progress
from lmbench.records.process import now
from lmbench.records.run import RunEnvironment

#: Edge of the square matrices: so large that launches, and the device's ramp-up at a kernel's start, cost nothing.
MATMUL_SIZE, CPU_MATMUL_SIZE = 8192, 1024
COPY_BYTES, CPU_COPY_BYTES = 2**31, 2**27
BURST_S = 0.04
BURSTS = 5
#: A pause between bursts, in which the card cools down and its clock rises again.
REST_S = 0.5

#: The data type and the float32 matmul precision of each kind of product, by its name.
MATMULS: dict[str, tuple[torch.dtype, str]] = {
    "bf16": (torch.bfloat16, "highest"),
    "fp16": (torch.float16, "highest"),
    "tf32": (torch.float32, "high"),
    "fp32": (torch.float32, "highest"),
}


def measure_ceiling(sustained_s: float, collectives: list[CollectiveRate]) -> CeilingRecord:
    """The rates of every kind of work on this process's device; each sustained rate is held for `sustained_s`.

    `collectives` are the rates that ranks on this machine have.
    """
    device = best_device()
    names = [*(("bf16", "fp32") if device.type == "cpu" else MATMULS), "copy"]
    rates = []
    with progress("ceiling", len(names), is_measured_here=True) as task:
        for name in names:
            task.begin(name)
            rates.append(copy_rate(device, sustained_s) if name == "copy" else matmul_rate(name, device, sustained_s))
    return CeilingRecord(1, now(), msgspec.convert(capture_environment(device), RunEnvironment), rates, collectives)


def matmul_rate(name: str, device: torch.device, sustained_s: float) -> Rate:
    """The rate, in FLOP/s, of products of square matrices; `name` is a key of MATMULS."""
    dtype, precision = MATMULS[name]
    size = CPU_MATMUL_SIZE if device.type == "cpu" else MATMUL_SIZE
    before = torch.get_float32_matmul_precision()
    # Use random values: products of zeros take less power and are faster.
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    torch.set_float32_matmul_precision(precision)
    try:
        return measure_rate(name, lambda: torch.matmul(a, b, out=out), 2.0 * size**3, device, sustained_s)
    finally:
        torch.set_float32_matmul_precision(before)


def copy_rate(device: torch.device, sustained_s: float) -> Rate:
    """The rate, in byte/s, at which a copy reads and writes the device's memory."""
    size_bytes = CPU_COPY_BYTES if device.type == "cpu" else COPY_BYTES
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    return measure_rate("copy", lambda: target.copy_(source), 2.0 * source.nbytes, device, sustained_s)


def device_seconds(device: torch.device, work: Callable[[], object], calls: int) -> float:
    """Seconds of the device that this many calls in a row take."""
    clock = device_of(device).clock("events")
    synchronize(device)
    start = clock.stamp()
    for _ in range(calls):
        work()
    end = clock.stamp()
    synchronize(device)
    return clock.seconds(start, end)


def measure_rate(
    name: str, work: Callable[[], object], amount: float, device: torch.device, sustained_s: float
) -> Rate:
    """The rate of some work, in bursts and then without a pause.

    Args:
        name: of the work, for the record.
        work: one call, which may return before the device has done it.
        amount: the FLOPs or bytes of one call.
        device: the device that does the work.
        sustained_s: how long the work is repeated without a pause.
    """
    clock, sensor = device_of(device).clock("events"), device_of(device).sensor()
    # Warm up, then find the number of calls that take BURST_S.
    device_seconds(device, work, 3)
    calls = max(1, round(BURST_S * 3 / device_seconds(device, work, 3)))
    bursts = []
    for _ in range(BURSTS):
        time.sleep(0 if device.type == "cpu" else REST_S)
        bursts.append(calls * amount / device_seconds(device, work, calls))
    opened, started = sensor.read(), time.perf_counter()
    stamps = [clock.stamp()]
    while time.perf_counter() - started < sustained_s:
        for _ in range(calls):
            work()
        stamps.append(clock.stamp())
        # Two groups of calls in the queue keep the device busy; without this limit the host would run minutes ahead.
        while len(stamps) > 2 and not clock.is_reached(stamps[-3]):
            time.sleep(0.001)
    # Read the sensors while the device still works: the clock of an idle device says nothing.
    closed = sensor.read()
    synchronize(device)
    total_s = sum(clock.seconds(start, end) for start, end in pairwise(stamps))
    state = derive_device_state(opened, closed)
    return Rate(
        name=name,
        burst_per_s=max(bursts),
        sustained_per_s=amount * calls * (len(stamps) - 1) / total_s,
        seconds=total_s,
        sm_clock_hz=closed.sm_clock_hz,
        mean_power_w=state.mean_power_w,
        power_capped_fraction=state.power_capped_fraction,
    )
