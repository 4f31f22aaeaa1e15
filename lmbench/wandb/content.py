"""What of a result arrives at W&B, under the names of the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmbench.masking import masked, masked_words
from lmbench.records.run import RunRecord
from lmbench.records.schema import leaves
from lmbench.records.vocabulary import PHASES, Span

#: Parts of a record that say what was measured, where and how: W&B's config. All others are its summary.
CONFIG_PARTS = frozenset({
    "schema_version", "run_id", "command", "argv", "replay_command", "config", "started_at", "rank", "world_size",
    "mode", "precision", "matmul_precision", "clock", "device_type", "zero_grad", "strict", "gc_policy", "repairs",
    "is_profiled", "model", "data", "flops", "environment", "sweep",
})  # fmt: skip

# The process that measured, and where W&B files the run: of no use to somebody who compares runs.
_LEFT_OUT = frozenset({"pid", "boot_id", "process_start_s", "wandb", "guards"})


@dataclass(frozen=True)
class Table:
    """A table for W&B: name, columns, rows of plain values."""

    name: str
    columns: tuple[str, ...]
    rows: list[list[Any]]


def _is_config(name: str) -> bool:
    # Of its place in a sweep, the cost was measured.
    return name.split(".", maxsplit=1)[0] in CONFIG_PARTS and not name.startswith("sweep.cost.")


def config_of(record: RunRecord) -> dict[str, Any]:
    """Dotted names of settings, configuration, environment, model, data, FLOPs and the cell, to their values."""
    found = {name: value for name, value in leaves(record).items() if _is_config(name)}
    # What another version wrote may have secrets.
    return {**masked(found), **({"argv": masked_words(record.argv)} if "argv" in found and record.argv else {})}


def summary_of(record: RunRecord, outcome: str) -> dict[str, Any]:
    """Dotted names of everything that was measured, of the guards, and of how the run ended.

    `outcome` is the outcome as a reader sees it: a run that was killed says `running` itself.
    """
    found = {
        name: value
        for name, value in leaves(record).items()
        if not _is_config(name) and name.split(".")[0] not in _LEFT_OUT
    }
    for guard in record.guards:
        told = {"status": guard.status, "value": guard.value, "limit": guard.limit}
        found |= {f"guards.{guard.name}.{key}": value for key, value in told.items() if value is not None}
    return {**found, "outcome": outcome}


def tables_of(record: RunRecord) -> list[Table]:
    """The phases with their statistics, and the guards; none of a run that did not come so far."""
    spans: tuple[Span, ...] = (*PHASES, "step")
    tables = (
        Table(
            "tables/phases",
            ("phase", "n", "mean_s", "std_s", "median_s", "min_s", "max_s", "share_fraction", "host.mean_s",
             "lag.median_s", "verdict"),
            [row for span in spans if (row := _phase_row(record, span))],
        ),
        Table(
            "tables/guards",
            ("name", "status", "value", "limit", "unit", "message", "advice"),
            [[g.name, g.status, g.value, g.limit, g.unit, g.message, g.advice] for g in record.guards],
        ),
    )  # fmt: skip
    return [table for table in tables if table.rows]


def _phase_row(record: RunRecord, span: Span) -> list[Any]:
    of = record.phases.get(span)
    if of is None:
        return []
    verdict = record.probe.verdicts.get(span) if record.probe.verdicts else None
    return [
        span, of.n, of.mean_s, of.std_s, of.median_s, of.min_s, of.max_s, of.share_fraction, of.host.mean_s,
        of.lag.median_s if of.lag else None, verdict.verdict if verdict else None,
    ]  # fmt: skip
