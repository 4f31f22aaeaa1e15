"""A sweep as one offline W&B run in its folder: what it varied, how its runs ended, and the cells as a table."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from lmbench.records.encoding import decode
from lmbench.records.load import Run, find_runs, load_run
from lmbench.records.paths import leaves
from lmbench.records.store import CELLS_FILE, RUNS_FOLDER, SWEEP_FILE
from lmbench.records.vocabulary import Record
from lmbench.wandb.offline_run import close_run, import_wandb, open_run
from lmbench.wandb.place import Place

#: Parts of sweep.json that say what the sweep is.
_CONFIG = ("name", "view", "created_at", "axes", "environments", "file")


def filed_runs(folder: Path) -> Iterator[Run]:
    """The runs of a sweep whose settings name a WandbLogger, without their steps."""
    for path in find_runs([folder / RUNS_FOLDER]):
        loaded = load_run(path, with_steps=False)
        if isinstance(loaded.run.get("wandb"), dict):
            yield loaded


def write_sweep_mirror(folder: Path) -> None:
    """Write the offline run in this process, from cells.csv and the runs' own records.

    Raises BoardProblem, OSError, or whatever wandb raises.
    """
    plan: Record = decode((folder / SWEEP_FILE).read_bytes())
    runs = [load_run(path, with_steps=False) for path in find_runs([folder / RUNS_FOLDER])]
    filed: Record = next((run.run["wandb"] for run in runs if isinstance(run.run.get("wandb"), dict)), {})
    name = str(plan.get("name"))
    # Another sweep of that name, in another folder or begun anew, is another run.
    digest = sha256(f"{name} {plan.get('created_at')}".encode()).hexdigest()[:8]
    config = dict(leaves({"sweep": {part: plan[part] for part in _CONFIG if plan.get(part) is not None}}))
    place = Place(folder)
    own = {"group": name, **filed, "name": name, "job_type": "sweep"}
    wandb_run = open_run(place, f"{name}-{digest}", name, own, config)
    columns, rows = read_cells(folder / CELLS_FILE)
    wandb_run.log({"cells": import_wandb().Table(columns=columns, data=rows)})
    outcomes = Counter(run.outcome for run in runs)
    wandb_run.summary.update({"runs": len(runs), **{f"outcomes.{name}": n for name, n in outcomes.items()}})
    close_run(place, wandb_run, rows=1, is_ok=True)


def read_cells(path: Path) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of cells.csv; a column of numbers has numbers, and what is empty is None."""
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    columns = [_typed([row[index] for row in rows]) for index in range(len(header))]
    return header, [list(row) for row in zip(*columns, strict=True)]


def _typed(texts: list[str]) -> list[Any]:
    try:
        return [float(text) if text else None for text in texts]
    except ValueError:
        return [text or None for text in texts]
