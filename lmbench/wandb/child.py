"""Write results as offline W&B runs beside them: `python -m lmbench.wandb.child RESULT...`, in a process of its own.

Only this module imports wandb.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from lmbench.records.load import load_run
from lmbench.records.run import RunRecord, WandbFiling
from lmbench.report.logged import STEP
from lmbench.wandb.content import began_at, config_of, name_of, series_of, summary_of, tables_of
from lmbench.wandb.publish import SERVER


def main(results: list[str]) -> int:
    """Write each; returns 1 if one could not be written. The last line printed says why."""
    # An offline run needs no key, so that none can get into its files.
    os.environ.pop("WANDB_API_KEY", None)
    # A full disk would otherwise be told of again with every line that wandb logs.
    logging.raiseExceptions = False
    try:
        import wandb

        # As an upload will have it: the settings of a working directory are read too, and this one is empty.
        print(f"{SERVER}{wandb.setup(wandb.Settings(silent=True)).settings.base_url}", flush=True)
    except Exception as error:
        return _complain(error)
    code = 0
    for result in results:
        try:
            write_run(Path(result))
        except Exception as error:
            code = _complain(error)
    return code


def _complain(error: Exception) -> int:
    is_missing = isinstance(error, ModuleNotFoundError) and error.name == "wandb"
    problem = f"wandb failed with {type(error).__name__}: {' '.join(str(error).split())}"
    print(f"\n{'wandb is not installed' if is_missing else problem}", flush=True)
    return 1


def write_run(result: Path) -> None:
    """Write a result's offline run, in the place of one that is there.

    W&B's own "created" is when it is uploaded: its interface takes no other time (UpsertBucket has no such input). Each
    step has the time at which it ended, the runtime is the run's, and `started_at` is in the configuration.

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
        group=filed.group or (record.sweep.name if record.sweep else None),
        tags=filed.tags,
        dir=str(result.resolve()),
        config=config_of(record),
        settings=wandb.Settings(
            mode="offline",
            silent=True,
            console="off",
            symlink=False,
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            # Otherwise wandb takes the time of this writing for the run's; nothing of the summary is derived.
            x_server_side_derived_summary=True,
        ),
    )
    run.define_metric(STEP, summary="none")
    run.define_metric("*", step_metric=STEP, summary="none")
    for row in series_of(loaded):
        run.log(row)
    run.summary.update(summary_of(record, loaded.outcome))
    began, lasted_s = began_at(record), record.milestones.closed_s
    if began is not None and lasted_s is not None:
        # W&B shows the first, and an older server the second.
        times = {"_wandb": {"runtime": round(lasted_s)}, "_runtime": lasted_s, "_timestamp": began + lasted_s}
        run.summary.update(times)
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
