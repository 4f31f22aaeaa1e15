"""Predicted peaks beside those an H200 measured: `nice python tests/experiments/memory_prediction_table.py [WORD...]`.

Takes the rows of tests/data/runs/h200_memory.csv that have every WORD (`2.7B`, `naive`, `compiled`) in a column; some
minutes on two cores for all.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
from paths import RUNS

from lmbench.memory.forecast import Request, ask_forecast, gpus_for

PHASES = ("forward", "backward", "optimizer")
CHOICE = ["size", "precision", "attention", "mode", "compile"]


def cells(*words):
    """The rows that have every word, by their name."""
    table = pd.read_csv(RUNS / "h200_memory.csv", comment="#", dtype=dict.fromkeys(CHOICE, str))
    rows = {" ".join(row[CHOICE]): row for _, row in table.iterrows()}
    return {name: row for name, row in rows.items() if set(words) <= set(name.split())}


def words_of(row):
    """The configuration of a row, as it is typed."""
    words = f"--model.size {row['size']} --trainer.precision {row.precision} --model.attention {row.attention}"
    words += f" --measure.mode {row['mode']} --data.batch_size 4 --data.context_length 512"
    return [*words.split(), *(["--trainer.compile", "true"] if row.compile == "compiled" else [])]


def errors(row, forecast):
    """Predicted over measured, less one: of the peak, of what is reserved, and of each phase."""
    made = {phase.phase: phase.total_bytes for phase in forecast.phases}
    phases = [phase for phase in PHASES if phase in made and pd.notna(row[f"{phase}_bytes"])]
    return {
        "peak": forecast.highest.total_bytes / row.peak_allocated_bytes - 1,
        "reserved": forecast.reserved_bytes / row.peak_reserved_bytes - 1,
        **{phase: made[phase] / row[f"{phase}_bytes"] - 1 for phase in phases},
    }


def main(words):
    rows = cells(*words)
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda row: ask_forecast(words_of(row), Request(gpus_for("H200"))), rows.values())
        table = pd.DataFrame([errors(row, one) for row, one in zip(rows.values(), made, strict=True)], [*rows])
    print(table.to_string(float_format="{:+.2%}".format))
    print(table.abs().agg(["median", "max"]).to_string(float_format="{:.2%}".format))


if __name__ == "__main__":
    main(sys.argv[1:])
