"""What a device attains at best, as a table beside its datasheet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmbench.hardware import find_gpu
from lmbench.kernels.shown.screen import print_lines, print_table
from lmbench.records.paths import number
from lmbench.records.vocabulary import Record
from lmbench.report.screen import make_console
from lmbench.report.table import Entry, Table, fact, numbers, words
from lmbench.report.units import MISSING, percent

_TERA = 1e12


def datasheet_rate(gpu_name: str | None, name: str) -> float | None:
    """The datasheet's rate for one kind of work, FLOP/s or byte/s; None for a device that is not in the table."""
    gpu = find_gpu(gpu_name or "")
    if gpu is None:
        return None
    rate: float | None = gpu.memory_bytes_per_s if name == "copy" else getattr(gpu, f"{name}_flops_per_s")
    return rate


def ceiling_table(record: Record) -> Table:
    """A row for each kind of work."""
    gpu = record["environment"]["gpu"].get("name")
    headings = [*words("work"), *numbers("datasheet", "burst", "sustained", "share", "MHz", "W", "capped")]
    return Table("Ceiling", _caption(record), headings, [_row(rate, gpu) for rate in record["rates"]])


def _row(rate: Record, gpu: str | None) -> list[Entry]:
    name = rate["name"]
    peak = datasheet_rate(gpu, name)
    clock, power = number(rate, "sm_clock_hz"), number(rate, "mean_power_w")
    rates = (peak, rate["burst_per_s"], rate["sustained_per_s"])
    figures = (
        *(MISSING if value is None else f"{value / _TERA:.3g}" for value in rates),
        percent(rate["sustained_per_s"] / peak if peak else None),
        MISSING if clock is None else f"{clock / 1e6:.0f}",
        MISSING if power is None else f"{power:.0f}",
        percent(number(rate, "power_capped_fraction")),
    )
    return [fact(f"{name} {'TB/s' if name == 'copy' else 'TFLOP/s'}"), *map(Entry, figures)]


def _caption(record: Record) -> str:
    rates = record["rates"]
    count, burst_s = number(rates[0], "bursts"), number(rates[0], "burst_s")
    stretches = "the best of some short stretches"
    if count is not None and burst_s is not None:
        stretches = f"best of {count:.0f} stretches of {burst_s * 1e3:.0f} ms"
    held_s = max(rate["seconds"] for rate in rates)
    return (
        f"burst: {stretches}; sustained: {held_s:.1f} s without a pause; share: sustained of the datasheet's; "
        "MHz, W, capped: while sustained"
    )


def print_ceiling(record: Record, path: Path) -> None:
    """Print the table and where the record lies."""
    console = make_console()
    environment: dict[str, Any] = record["environment"]
    gpu, host = environment["gpu"], environment["host"]
    limit = f", power limit {gpu['power_limit_w']:.0f} W" if gpu.get("power_limit_w") else ""
    device = f"{gpu.get('name') or host.get('cpu_model')}{limit}, torch {environment['versions']['torch']}"
    print_lines([("device", device)], console)
    print_table(ceiling_table(record), console)
    console.out("")
    print_lines([("result", str(path))], console)
