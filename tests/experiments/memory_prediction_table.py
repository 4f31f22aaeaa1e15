"""Predicted peaks beside those an H200 measured: `nice python tests/experiments/memory_prediction_table.py [WORD...]`.

Takes the rows of tests/data/runs/h200_memory.csv that have every WORD (`2.7B`, `naive`, `compiled`) in a column; some
minutes on two cores for all. Exits 1 where a figure misses what issue 11 asks.
"""

from __future__ import annotations

import csv
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pandas as pd
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
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [errors(cell, made) for cell, made in zip(chosen, pool.map(predicted, chosen), strict=True)]
    table = pd.DataFrame(
        [{"compile": cell.row["compile"], "peak": e.peak, "reserved": e.reserved, **e.phases}
         for cell, e in zip(chosen, found, strict=True)],
        [cell.name for cell in chosen],
    )  # fmt: skip
    print(table.to_string(float_format="{:+.2%}".format))
    worst = table["peak"].abs().groupby(table["compile"]).agg(["median", "max"])
    print(worst.to_string(float_format="{:.2%}".format))
    allowed = pd.DataFrame(ALLOWED, ["median", "max"]).T.loc[worst.index]
    phases = table[table.columns.intersection(PHASES)].abs().max().max()
    return 0 if (worst <= allowed).all(axis=None) and phases <= ALLOWED_OF_A_PHASE else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
