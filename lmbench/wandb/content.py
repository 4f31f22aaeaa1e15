"""What of a result arrives at W&B, under the names of the field registry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lmbench.records.paths import leaves, lookup
from lmbench.records.vocabulary import PHASES, Record

#: Parts of run.json that say what was measured, where and how: W&B's config. All other parts are its summary.
CONFIG_PARTS = (
    "schema_version", "run_id", "command", "argv", "replay_command", "config", "started_at", "rank", "world_size",
    "mode", "precision", "matmul_precision", "clock", "device_type", "zero_grad", "strict", "gc_policy", "repairs",
    "is_profiled", "model", "data", "flops", "environment",
)  # fmt: skip

#: Of `sweep`, what is no setting of the cell.
_SWEEP_MEASURED = ("cost",)

# The process that measured, and where W&B files the run: of no use to somebody who compares runs.
_LEFT_OUT = ("pid", "boot_id", "process_start_s", "wandb")

_PHASE_COLUMNS = ("n", "mean_s", "std_s", "median_s", "min_s", "max_s", "share_fraction", "host.mean_s", "lag.median_s")
_GUARD_COLUMNS = ("name", "status", "value", "limit", "unit", "message", "advice")


@dataclass(frozen=True)
class Table:
    """A table for W&B: name, columns, rows of plain values."""

    name: str
    columns: tuple[str, ...]
    rows: list[list[Any]]


def history_rows(steps: Iterable[Record]) -> Iterator[Record]:
    """One row a step record; what was not measured is left out."""
    for step in steps:
        yield {name: value for name, value in step.items() if value is not None}


def config_of(run: Record) -> Record:
    """Dotted names of settings, configuration, environment, model, data, FLOPs and the cell, to their values."""
    parts = {part: run[part] for part in CONFIG_PARTS if run.get(part) is not None}
    if run.get("sweep"):
        parts["sweep"] = _without(run["sweep"], set(_SWEEP_MEASURED))
    return dict(leaves(parts))


def summary_of(run: Record, outcome: str) -> Record:
    """Dotted names of everything that was measured, of the guards, and of how the run ended.

    `outcome` is the outcome as a reader sees it: a run that was killed says `running` itself.
    """
    skipped = {*CONFIG_PARTS, *_LEFT_OUT, "guards"}
    parts = _without(run, skipped)
    if run.get("sweep"):
        parts["sweep"] = {name: run["sweep"][name] for name in _SWEEP_MEASURED if run["sweep"].get(name)}
    found = {name: value for name, value in leaves(parts) if value is not None and value != {}}
    for guard in run.get("guards") or []:
        for key in ("status", "value", "limit"):
            if guard.get(key) is not None:
                found[f"guards.{guard['name']}.{key}"] = guard[key]
    return {**found, "outcome": outcome}


def tables_of(run: Record) -> list[Table]:
    """The phases with their statistics, and the guards; none of a run that did not come so far."""
    phases = [_phase_row(run, phase) for phase in (*PHASES, "step") if (run.get("phases") or {}).get(phase)]
    guards = [[guard.get(column) for column in _GUARD_COLUMNS] for guard in run.get("guards") or []]
    tables = (
        Table("tables/phases", ("phase", *_PHASE_COLUMNS, "verdict"), phases),
        Table("tables/guards", _GUARD_COLUMNS, guards),
    )
    return [table for table in tables if table.rows]


def _phase_row(run: Record, phase: str) -> list[Any]:
    summary = run["phases"][phase]
    verdict = lookup(run, f"probe.verdicts.{phase}.verdict")
    return [phase, *(lookup(summary, column) for column in _PHASE_COLUMNS), verdict]


def _without(record: Record, names: set[str]) -> Record:
    return {name: value for name, value in record.items() if name not in names}
