"""What of a result arrives at W&B: a name, a flat configuration, series, a summary of what decides, and tables.

Measured on two busy cores by tests/experiments/wandb_costs.py: a process that writes 1 step takes 1.7 s, 100 steps 2.1
s, 10 000 steps 5.4 s (1.5 s of it are start-up), for files of 0.01, 0.09 and 7.8 MB.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib.resources import files
from typing import Any

from lmbench.masking import masked, masked_words, shown
from lmbench.precision import short_label
from lmbench.records.codec import as_dict
from lmbench.records.load import Run
from lmbench.records.passes import TIMING, pass_of
from lmbench.records.run import RunRecord
from lmbench.records.schema import recorded, value_at
from lmbench.report import logged
from lmbench.report.facts import EAGER, Value, fact_of, other_axes, read_facts
from lmbench.report.run import phase_table, rank_tables

#: Facts that a run's name tells, in its order, and how; others by their values.
_NAMED = {"size": "{}", "mode": "{}", "precision": "{}", "compile": "{}", "batch": "b{}", "context": "c{}"}
_NAME_WIDTH = 120


def _facts_of(record: RunRecord) -> dict[str, Value]:
    """What tells this run from others: the facts of a report, and axes of its sweep that no fact stands for."""
    axes = _axes(record)
    others = {name: masked(value, name) for name, value in other_axes(axes).items()}
    return read_facts(record, (axes, {}, record.config or {})) | others


def _axes(record: RunRecord) -> Mapping[str, Any]:
    return record.sweep.axes if record.sweep and record.sweep.axes else {}


def name_of(record: RunRecord) -> str:
    """`small bf16-mixed compiled b4 c512 r0`: what was measured, and which repeat in a sweep."""
    repeat = record.sweep.repeat if record.sweep else None
    return f"{label_of(record)}{'' if repeat is None else f' r{repeat}'}"


def label_of(record: RunRecord) -> str:
    """`small bf16-mixed compiled b4 c512`: what was measured, the same for all repeats of a cell."""
    facts = _facts_of(record)
    if "precision" in facts:
        matmul = facts.get("matmul")
        facts["precision"] = short_label(str(facts["precision"]), None if matmul is None else str(matmul))
    if facts.get("mode") == "train_step":
        del facts["mode"]
    if facts.get("compile") != EAGER and "compile" in facts:
        facts["compile"] = f"compiled {facts['compile']}".removesuffix(" default")
    words = [text.format(facts[name]) for name, text in _NAMED.items() if name in facts]
    axes = _axes(record)
    others = [name for name in dict.fromkeys(map(fact_of, axes)) if name in facts and name not in (*_NAMED, "matmul")]
    words += [f"{name.rpartition('.')[2]}={facts[name]}" for name in others]
    if (looked_at := pass_of(record, axes).name) != TIMING:
        words.append(looked_at)
    return shown(" ".join(words))[:_NAME_WIDTH] or str(record.run_id)


def config_of(record: RunRecord) -> dict[str, Any]:
    """Facts by their names (`size`, `precision`, `batch`), then fields as config.csv names them, and all options, as
    `trainer/max_steps`.

    No name has a dot, which W&B would take for a path.
    """
    config: dict[str, Any] = {"label": label_of(record), "pass": pass_of(record, _axes(record)).name}
    config |= {name.replace(".", "/"): value for name, value in _facts_of(record).items()}
    text = (files("lmbench.wandb") / "config.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        if (value := value_at(record, row["field"])) is not None:
            config.setdefault(row["name"], masked(value, row["field"]))
    if "sweep" in config:
        config.setdefault("study", config["sweep"])
    for name, value in recorded(record).items():
        option = name.removeprefix("config.").replace("described.", "")
        if option != name:
            config.setdefault(option.replace(".", "/"), masked(value, option))
    return config


def summary_of(record: RunRecord, outcome: str) -> dict[str, Any]:
    """What decides, by the names of logged.py; how the run ended; which guards did not pass; and verdicts.

    `outcome` is the outcome as a reader sees it: a run that was killed says `running` itself.
    """
    summary: dict[str, Any] = {"outcome": outcome, **logged.of_run(record)}
    if record.error is not None:
        summary |= {f"error/{name}": getattr(record.error, name) for name in ("kind", "message", "phase")}
    for status, name in (("fail", "failed"), ("warn", "warned")) if record.guards else ():
        names = [guard.name for guard in record.guards or () if guard.status == status]
        summary |= {f"guards/{name}_count": len(names), f"guards/{name}": ", ".join(names)}
    for span, verdict in (record.probe.verdicts or {}).items():
        summary[f"verdict/{span}"] = verdict.verdict
    return {name: value for name, value in summary.items() if value is not None}


def series_of(run: Run) -> Iterator[dict[str, Any]]:
    """A row for each step, at the time when it ended: near the record's times, which are to a second."""
    record = run.record
    began, ready_s = began_at(record), record.milestones.ready_s
    ended_s = 0.0
    for step in run.steps:
        row: dict[str, Any] = {logged.STEP: step.step, **logged.of_step(step, record)}
        if record.clock == "host":
            # On a CPU the host's spans are the device's.
            row = {name: value for name, value in row.items() if not name.startswith("host/")}
        ended_s += (step.step_s or 0.0) + (step.excluded_s or 0.0)
        yield row if began is None or ready_s is None else {**row, "_timestamp": began + ready_s + ended_s}


def began_at(record: RunRecord) -> float | None:
    """When the run's process began, in seconds of Unix time, to a second; None where the record does not tell."""
    if record.ended_at is None or record.milestones.closed_s is None:
        return None
    return datetime.fromisoformat(record.ended_at).timestamp() - record.milestones.closed_s


def tables_of(record: RunRecord) -> dict[str, list[dict[str, Any]]]:
    """Rows of the phases with their statistics, of several ranks, of the guards, and of the whole record in SI units;
    of a run that did not come so far those that there are."""
    values: dict[str, Any] = masked(recorded(record))
    values |= {"argv": masked_words(record.argv)} if record.argv else {}
    values.pop("guards", None)
    step = record.phases.step
    tables: dict[str, list[dict[str, Any]]] = {
        "tables/phases": phase_table(record, step).records() if step is not None else [],
        "tables/ranks": [row for table in rank_tables(record) for row in table.records()],
        "tables/guards": [as_dict(guard) for guard in record.guards],
        "tables/record": [{"field": name, "value": str(value)} for name, value in values.items()],
    }
    return {name: rows for name, rows in tables.items() if rows}
