"""Published sums in 16-bit arithmetic by a loop, run here beside `torch.sum`."""

from __future__ import annotations

import torch

from lmbench.device import best_device, device_of
from lmbench.reference import Accumulation, load_rows
from lmbench.report.answer import Answer, Column, Line, Table
from lmbench.report.units import Unit


def run_loop(loop: Accumulation, device: torch.device) -> float:
    """The sum of a published loop, computed here."""
    total = torch.tensor(0.0, dtype=getattr(torch, loop.accumulator), device=device)
    addend = torch.tensor(loop.addend, dtype=getattr(torch, loop.addend_dtype), device=device)
    for _ in range(loop.n):
        total += addend.float() if loop.is_cast else addend
    return float(total.item())


def measure_numerics() -> Answer:
    """Each loop's sum here, by `torch.sum`, and as published; on the GPU, or on the CPU where there is none."""
    device, rows = best_device(), []
    for loop in (loops := load_rows("accumulation.csv", Accumulation)):
        addends = torch.full((loop.n,), loop.addend, dtype=getattr(torch, loop.addend_dtype), device=device)
        plain_sum = addends.sum(dtype=getattr(torch, loop.accumulator)).item()
        addend = loop.addend_dtype + (".float()" if loop.is_cast else "")
        rows.append([f"{loop.accumulator} += {addend}", run_loop(loop, device), plain_sum, loop.results])
    unit = Unit("{:.8g}".format)
    columns = [Column("total += addend"), Column("loop", unit), Column("torch.sum", unit), Column("published")]
    # Every write-up has the first loop.
    caption = f"{loops[0].n:,} x {loops[0].addend:g}, run here; as printed by write-ups {loops[0].sources}"
    table = Table("sums", "Published sums", columns, rows, f"{caption} (lmbench/reference/README.md)")
    _, loop_sum, plain_sum, _ = rows[0]
    headline = [
        Line("sums", f"1,000 x 0.01 is {loop_sum} by a loop in float16, and {plain_sum:g} by torch.sum"),
        Line("device", f"{device_of(device).name()}, torch {torch.__version__}"),
    ]
    return Answer(headline, [table])
