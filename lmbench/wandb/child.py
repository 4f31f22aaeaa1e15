"""Writes results as offline W&B runs beside them, in a separate process: `python -m lmbench.wandb.child RESULT...`.

A W&B run has a name, a flat configuration, series, a summary of the important numbers, and tables. Measured on two busy
cores: the process takes 1.7 s for 1 step, 2.1 s for 100 steps and 5.4 s for 10 000 steps. Start-up takes 1.5 s of it.
The files have 0.01, 0.09 and 7.8 MB.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

from lmbench.errors import error_line
from lmbench.files import short_digest
from lmbench.masking import masked, masked_words, shown
from lmbench.records.codec import as_dict
from lmbench.records.load import load_run
from lmbench.records.passes import TIMING, pass_of
from lmbench.records.run import RunRecord, WandbFiling
from lmbench.records.schema import recorded, value_at
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import Values
from lmbench.report import logged
from lmbench.report.facts import Facts, describe, fact_of, other_facts, read_facts
from lmbench.report.logged import STEP
from lmbench.wandb.publish import SERVER

#: The facts that come first in a run's name, before those of its sweep's axes.
_NAMED = ("size", "mode", "precision", "compile", "batch", "context")


def _facts_of(record: RunRecord) -> Facts:
    """The facts of the run, and its sweep's axes that set no fact."""
    return read_facts(record) | other_facts(record.axes)


def name_of(record: RunRecord) -> str:
    """The label of the run, in a sweep with its repeat: `small, bf16-mixed, compiled, batch 4, context 512 r0`."""
    repeat = record.place.repeat
    return label_of(record) if repeat is None else f"{label_of(record)} r{repeat}"


def label_of(record: RunRecord) -> str:
    """The run's configuration in words, the same for all repeats of a cell."""
    facts = _facts_of(record)
    if facts.get("mode") == "train_step":
        del facts["mode"]
    words = describe(facts, list(dict.fromkeys([*_NAMED, *map(fact_of, record.axes)])))
    if (run_pass := pass_of(record, record.axes).name) != TIMING:
        words += f", {run_pass}"
    return shown(words)[:120] or str(record.run_id)


def config_of(record: RunRecord) -> Values:
    """Facts by their names (`size`, `precision`, `batch`), then fields as config.csv names them, then all options, such
    as `trainer/max_steps`.

    No name has a dot, which W&B would take for a path.
    """
    config: Values = {"label": label_of(record), "pass": pass_of(record, record.axes).name}
    config |= {name.replace(".", "/"): value for name, value in _facts_of(record).items()}
    text = (files("lmbench.wandb") / "config.csv").read_text(encoding="utf-8")
    for name, field in csv.reader(text.splitlines()[1:]):
        if (value := value_at(record, field)) is not None:
            config.setdefault(name, masked(value, field))
    if "sweep" in config:
        config.setdefault("study", config["sweep"])
    for name, value in recorded(record).items():
        option = name.removeprefix("config.").replace("described.", "")
        if option != name:
            config.setdefault(option.replace(".", "/"), masked(value, option))
    return config


def summary_of(record: RunRecord, outcome: str) -> Values:
    """The important numbers by the names of logged.py, the outcome, the guards that did not pass, and verdicts.

    `outcome` is the outcome as a reader sees it, since the record of a killed run still says `running`.
    """
    summary = {"outcome": outcome, **logged.of_run(record)}
    if record.error is not None:
        summary |= {f"error/{name}": getattr(record.error, name) for name in ("kind", "message", "phase")}
    for status, name in (("fail", "failed"), ("warn", "warned")) if record.guards else ():
        names = [guard.name for guard in record.guards if guard.status == status]
        summary |= {f"guards/{name}_count": len(names), f"guards/{name}": ", ".join(names)}
    summary |= {f"verdict/{span}": lag.verdict for span, lag in record.probe.lags.items()}
    return {name: value for name, value in summary.items() if value is not None}


def tables_of(record: RunRecord) -> dict[str, list[Values]]:
    """The non-empty tables by name: guards, and the whole record in SI units."""
    values: Values = masked(recorded(record))
    values |= {"argv": masked_words(record.argv)} if record.argv else {}
    values.pop("guards", None)
    tables = {
        "tables/guards": [as_dict(guard) for guard in record.guards],
        "tables/record": [{"field": name, "value": str(value)} for name, value in values.items()],
    }
    return {name: rows for name, rows in tables.items() if rows}


def main(results: list[str]) -> int:
    """Write every result as a W&B run; returns 1 after a failure, which the last line explains."""
    # An offline run needs no key, and without one none can get into its files.
    os.environ.pop("WANDB_API_KEY", None)
    # On a full disk, logging would otherwise print an error for every line of wandb's log.
    logging.raiseExceptions = False
    tasks: list[Callable[[], None]] = [_print_server, *(partial(write_run, Path(result)) for result in results)]
    code = 0
    for task in tasks:
        try:
            task()
        except Exception as error:
            problem = f"wandb failed with {error_line(error)}"
            if isinstance(error, ModuleNotFoundError) and error.name == "wandb":
                problem = "wandb is not installed"
            print(f"\n{problem}", flush=True)
            code = 1
    return code


def _print_server() -> None:
    """Print the address of the server to which an upload goes.

    wandb also reads settings in the working directory; that of this process is empty.
    """
    import wandb

    print(f"{SERVER}{wandb.setup(wandb.Settings(silent=True)).settings.base_url}", flush=True)


def write_run(result: Path) -> None:
    """Write a result's offline run; an earlier one is replaced.

    W&B's "created" is the time of the upload, since its interface takes no other time (UpsertBucket has no such input).
    The runtime is that of the measured run, and its `started_at` is in the configuration.

    Raises:
        OSError: the files cannot be written.
        Exception: whatever wandb raises.
    """
    import wandb

    loaded = load_run(result)
    record, folder = loaded.record, result / "wandb"
    filed = record.wandb or WandbFiling()
    # rmtree raises for a link, so that nothing outside of the result is removed, and then sent.
    if os.path.lexists(folder):
        shutil.rmtree(folder)
    # By default wandb stages tables and artifacts in the user's home.
    os.environ["WANDB_DATA_DIR"] = str(folder.resolve() / "staging")
    run: Any = wandb.init(
        id=stable_id(record),
        name=name_of(record),
        project=filed.project or "lmbench",
        entity=filed.entity,
        group=filed.group or record.place.name,
        tags=filed.tags,
        dir=str(result.resolve()),
        config=config_of(record),
        # Without `x_server_side_derived_summary` wandb would take the times of this writing for those of the run.
        settings=wandb.Settings(**json.loads((files("lmbench.wandb") / "settings.json").read_bytes())),
    )
    run.define_metric(STEP, summary="none")
    run.define_metric("*", step_metric=STEP, summary="none")
    began_s, end = None, {}
    if record.ended_at is not None and (lasted_s := record.milestones.closed_s) is not None:
        ended_s = datetime.fromisoformat(record.ended_at).timestamp()
        began_s, end = ended_s - lasted_s, {"_wandb": {"runtime": round(lasted_s)}, "_timestamp": ended_s}
    for number, (step, time_s) in enumerate(zip(loaded.steps, step_times(record, loaded.steps), strict=True)):
        times = {} if began_s is None else {"_timestamp": began_s + time_s}
        row = {STEP: step.step, "_runtime": time_s, **times, **logged.of_step(step, record)}
        # `run.log` would replace `_runtime` by the time of this writing.
        run._interface.publish_history(run, row, number)
    run.summary.update(summary_of(record, loaded.outcome) | end)
    for name, rows in tables_of(record).items():
        run.summary[name] = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
    if filed.artifact:
        artifact = wandb.Artifact(f"result-{run.id}", type="lmbench-result")
        for path in artifact_files(result):
            # `immutable` refers to the file, where wandb would otherwise keep a copy beside it until the upload.
            artifact.add_file(str(path), policy="immutable")
        run.log_artifact(artifact)
    run.finish(exit_code=0 if loaded.outcome == "ok" else 1)


def step_times(record: RunRecord, steps: Sequence[StepRecord]) -> list[float]:
    """The end of each step in seconds since the process began: the steps before the window end with its opening."""
    lengths_s = [(step.step_s or 0.0) + (step.excluded_s or 0.0) for step in steps]
    before_s = sum(length_s for step, length_s in zip(steps, lengths_s, strict=True) if step.is_warmup)
    opened_s = record.milestones.window_opened_s or record.milestones.stepped_s or before_s
    return [opened_s - before_s + end_s for end_s in accumulate(lengths_s)]


def artifact_files(result: Path) -> list[Path]:
    """The files of a result that its artifact holds: without links, which may lead to files outside of the result."""
    paths = sorted(path for path in result.iterdir() if not path.name.startswith("."))
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def stable_id(record: RunRecord) -> str:
    """W&B's id of a run: the same at every upload, and different for another run of the same name."""
    return short_digest(f"{record.run_id} {record.started_at} {record.boot_id} {record.pid}", 16)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
