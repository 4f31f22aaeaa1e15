"""What a device attains at best, as a table beside its datasheet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lmbench.hardware import find_gpu
from lmbench.report.terminal import make_console
from lmbench.report.units import MISSING, percent
from lmbench.results.paths import number

UNITS = {"copy": ("TB/s", 1e12)}
FLOPS = ("TFLOP/s", 1e12)


def datasheet_rate(gpu_name: str | None, name: str) -> float | None:
    """The datasheet's rate for one kind of work, FLOP/s or byte/s; None for a device that is not in the table."""
    gpu = find_gpu(gpu_name or "")
    if gpu is None:
        return None
    rate: float | None = gpu.memory_bytes_per_s if name == "copy" else getattr(gpu, f"{name}_flops_per_s")
    return rate


def ceiling_table(record: dict[str, Any]) -> Table:
    """A row for each kind of work."""
    gpu = record["environment"]["gpu"].get("name")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("work", no_wrap=True)
    for column in ("datasheet", "burst", "sustained", "share", "MHz", "W", "capped"):
        table.add_column(column, justify="right", no_wrap=True)
    for rate in record["rates"]:
        unit, scale = UNITS.get(rate["name"], FLOPS)
        peak = datasheet_rate(gpu, rate["name"])
        clock, power = number(rate, "sm_clock_hz"), number(rate, "mean_power_w")
        table.add_row(
            f"{rate['name']} {unit}",
            *(MISSING if value is None else f"{value / scale:.3g}" for value in (peak, rate["burst_per_s"])),
            f"{rate['sustained_per_s'] / scale:.3g}",
            percent(rate["sustained_per_s"] / peak if peak else None),
            MISSING if clock is None else f"{clock / 1e6:.0f}",
            MISSING if power is None else f"{power:.0f}",
            percent(number(rate, "power_capped_fraction")),
        )
    return table


def print_ceiling(record: dict[str, Any], path: Path) -> None:
    """Print the table and where the record lies."""
    console = make_console()
    environment = record["environment"]
    gpu, host = environment["gpu"], environment["host"]
    limit = f", power limit {gpu['power_limit_w']:.0f} W" if gpu.get("power_limit_w") else ""
    console.print(
        f"{gpu.get('name') or host.get('cpu_model')}{limit}, torch {environment['versions']['torch']}", markup=False
    )
    held = max(rate["seconds"] for rate in record["rates"])
    console.print(f"burst: best of 5 stretches of 40 ms; sustained: {held:.1f} s without a pause;", markup=False)
    console.print("share: sustained of the datasheet's; MHz, W, capped: while sustained", markup=False)
    console.print(ceiling_table(record))
    console.print(f"result  {path}", markup=False, soft_wrap=True)
