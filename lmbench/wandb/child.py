"""Results as offline W&B runs beside them: `python -m lmbench.wandb.child RESULT...`, in a process of its own.

Only this module imports wandb. A run there has a name, a flat configuration, series, a summary of what decides, and
tables. Measured on two busy cores: a process that writes 1 step takes 1.7 s, 100 steps 2.1 s, 10 000 steps 5.4 s (1.5 s
of it are start-up), for files of 0.01, 0.09 and 7.8 MB.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from lmbench.masking import masked, masked_words, shown
from lmbench.records.codec import as_dict
from lmbench.records.load import load_run
from lmbench.records.passes import TIMING, pass_of
from lmbench.records.run import RunRecord, WandbFiling
from lmbench.records.schema import recorded, value_at
from lmbench.report import logged
from lmbench.report.facts import Value, fact_of, in_words, other_axes, read_facts
from lmbench.report.logged import STEP
from lmbench.report.run import phase_table, rank_tables
from lmbench.wandb.publish import SERVER

#: Facts that a run's name tells first; then those of its sweep's axes.
_NAMED = ("size", "mode", "precision", "compile", "batch", "context")


def _facts_of(record: RunRecord) -> dict[str, Value]:
    """What tells this run from others: the facts of a report, and axes of its sweep that no fact stands for."""
    return read_facts(record) | other_axes(_axes(record))


def _axes(record: RunRecord) -> Mapping[str, Any]:
    return value_at(record, "sweep.axes") or {}


def name_of(record: RunRecord) -> str:
    """`small, bf16-mixed, compiled, batch 4, context 512 r0`: what was measured, and which repeat in a sweep."""
    repeat = value_at(record, "sweep.repeat")
    return f"{label_of(record)}{'' if repeat is None else f' r{repeat}'}"


def label_of(record: RunRecord) -> str:
    """What was measured, the same for all repeats of a cell."""
    facts, axes = _facts_of(record), _axes(record)
    if facts.get("mode") == "train_step":
        del facts["mode"]
    words = in_words(facts, list(dict.fromkeys([*_NAMED, *map(fact_of, axes)])))
    if (looked_at := pass_of(record, axes).name) != TIMING:
        words += f", {looked_at}"
    return shown(words)[:120] or str(record.run_id)


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
        names = [guard.name for guard in record.guards if guard.status == status]
        summary |= {f"guards/{name}_count": len(names), f"guards/{name}": ", ".join(names)}
    for span, verdict in (record.probe.verdicts or {}).items():
        summary[f"verdict/{span}"] = verdict.verdict
    return {name: value for name, value in summary.items() if value is not None}


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


def main(results: list[str]) -> int:
    """Write each; returns 1 if one could not be written. The last line printed says why."""
    # An offline run needs no key, so that none can get into its files.
    os.environ.pop("WANDB_API_KEY", None)
    # A full disk would otherwise be told of again with every line that wandb logs.
    logging.raiseExceptions = False
    works: list[Callable[[], None]] = [_tell_server, *(partial(write_run, Path(result)) for result in results)]
    code = 0
    for work in works:
        try:
            work()
        except Exception as error:
            is_missing = isinstance(error, ModuleNotFoundError) and error.name == "wandb"
            problem = f"wandb failed with {type(error).__name__}: {' '.join(str(error).split())}"
            print(f"\n{'wandb is not installed' if is_missing else problem}", flush=True)
            code = 1
    return code


def _tell_server() -> None:
    """Print where an upload goes: the settings of a working directory are read too, and this one is empty."""
    import wandb

    print(f"{SERVER}{wandb.setup(wandb.Settings(silent=True)).settings.base_url}", flush=True)


def write_run(result: Path) -> None:
    """Write a result's offline run, in the place of one that is there.

    W&B's own "created" is when it is uploaded: its interface takes no other time (UpsertBucket has no such input). The
    runtime is the run's, and `started_at` is in the configuration.

    Raises OSError, or whatever wandb raises.
    """
    import wandb

    loaded = load_run(result)
    record, folder = loaded.record, result / "wandb"
    filed = record.wandb or WandbFiling()
    # Never through a link: what is removed, and then sent, is the result's. (rmtree raises for a link.)
    if os.path.lexists(folder):
        shutil.rmtree(folder)
    # By itself wandb would leave what it keeps of tables and artifacts in the user's home.
    os.environ["WANDB_DATA_DIR"] = str(folder.resolve() / "staging")
    run: Any = wandb.init(
        id=stable_id(record),
        name=name_of(record),
        project=filed.project or "lmbench",
        entity=filed.entity,
        group=filed.group or value_at(record, "sweep.name"),
        tags=filed.tags,
        dir=str(result.resolve()),
        config=config_of(record),
        # Without `x_server_side_derived_summary` wandb takes the time of this writing for the run's.
        settings=wandb.Settings(**json.loads((files("lmbench.wandb") / "settings.json").read_bytes())),
    )
    run.define_metric(STEP, summary="none")
    run.define_metric("*", step_metric=STEP, summary="none")
    for step in loaded.steps:
        run.log({STEP: step.step, **logged.of_step(step, record)})
    run.summary.update(summary_of(record, loaded.outcome))
    if record.ended_at is not None and (lasted_s := record.milestones.closed_s) is not None:
        ended_s = datetime.fromisoformat(record.ended_at).timestamp()
        run.summary.update({"_wandb": {"runtime": round(lasted_s)}, "_timestamp": ended_s})
    for name, rows in tables_of(record).items():
        run.summary[name] = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
    if filed.artifact:
        artifact = wandb.Artifact(f"result-{run.id}", type="lmbench-result")
        for path in own_files(result):
            # By name: a copy would lie beside it until it is uploaded.
            artifact.add_file(str(path), policy="immutable")
        run.log_artifact(artifact)
    run.finish(exit_code=0 if loaded.outcome == "ok" else 1)


def own_files(result: Path) -> list[Path]:
    """The files of a result that go along as its artifact: no links, which may lead to somebody else's."""
    paths = sorted(path for path in result.iterdir() if not path.name.startswith("."))
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def stable_id(record: RunRecord) -> str:
    """What W&B knows a run by: the same at every upload, and another one for another run of the same name."""
    process = f"{record.run_id} {record.started_at} {record.boot_id} {record.pid}"
    return sha256(process.encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
