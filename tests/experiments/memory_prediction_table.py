"""Predicted peaks beside those an H200 measured: `nice python tests/experiments/memory_prediction_table.py [WORD...]`.

Takes the rows of tests/data/runs/h200_memory.csv that have every WORD (`2.7B`, `naive`, `compiled`) in a column; some
minutes on two cores for all. Exits 1 where a figure misses what issue 11 asks.
"""

from __future__ import annotations

import csv
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from paths import RUNS

from lmbench.memory.forecast import Request, ask_forecast, gpu_for

MEASURED = RUNS / "h200_memory.csv"
PHASES = ("forward", "backward", "optimizer")
AT_ONCE = 2
#: Largest error allowed in the median and at worst, of the peak.
ALLOWED = {"eager": (0.01, 0.03), "compiled": (0.02, 0.05)}
ALLOWED_OF_A_PHASE = 0.02


class Cell(NamedTuple):
    """A configuration that was measured, and what was."""

    name: str
    words: list[str]
    row: dict[str, str]

    def measured_bytes(self, column):
        found = self.row.get(f"{column}_bytes")
        return int(found) if found else None


class Errors(NamedTuple):
    """Predicted against measured, less one."""

    peak: float
    reserved: float
    phases: dict[str, float]


def cells(words=()):
    """The rows that have every word."""
    lines = [line for line in MEASURED.read_text().splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines):
        choice = [row[key] for key in ("size", "precision", "attention", "mode", "compile")]
        if not set(words) <= set(choice):
            continue
        size, precision, attention, mode, compiled = choice
        options = ["--model.size", size, "--trainer.precision", precision, "--model.attention", attention]
        options += ["--measure.mode", mode, "--data.batch_size", "4", "--data.context_length", "512"]
        options += ["--trainer.compile", "true"] if compiled == "compiled" else []
        yield Cell(" ".join(choice), options, row)


def predicted(cell):
    return ask_forecast(cell.words, Request(gpu_for("H200"), finds_largest=False))


def errors(cell, made):
    def error(told_bytes, column):
        return told_bytes / (cell.measured_bytes(column) or 1) - 1

    phases = {
        one.phase: error(one.total_bytes, one.phase)
        for one in made.phases
        if one.phase in PHASES and cell.measured_bytes(one.phase)
    }
    peak = error(made.highest.total_bytes, "peak_allocated")
    return Errors(peak, error(made.reserved_bytes, "peak_reserved"), phases)


def main(words):
    chosen = list(cells(words))
    found = {}
    fits = True
    print(f"{'cell':<44} predicted measured GiB  peak reserved |  {'  '.join(PHASES)} | took")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for cell, made in zip(chosen, pool.map(predicted, chosen), strict=True):
            told = errors(cell, made)
            measured = cell.measured_bytes("peak_allocated") or 0
            phases = [f"{told.phases[phase]:+9.2%}" if phase in told.phases else f"{'-':>9}" for phase in PHASES]
            print(
                f"{cell.name:<44} {made.highest.total_bytes / 2**30:9.3f} {measured / 2**30:8.3f} "
                f"{told.peak:+9.2%} {told.reserved:+8.2%} | {' '.join(phases)} | {made.took_s:.0f} s",
                flush=True,
            )
            found.setdefault(cell.row["compile"], []).append(abs(told.peak))
            fits &= all(abs(each) <= ALLOWED_OF_A_PHASE for each in told.phases.values())
    for kind, each in found.items():
        median, worst = statistics.median(each), max(each)
        fits &= median <= ALLOWED[kind][0] and worst <= ALLOWED[kind][1]
        print(f"{kind}: median {median:.2%}, worst {worst:.2%} of {len(each)}")
    return 0 if fits else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
