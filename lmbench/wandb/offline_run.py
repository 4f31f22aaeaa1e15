"""One offline W&B run, opened and closed. Only the process that writes for W&B imports wandb."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from lmbench.records.vocabulary import Record
from lmbench.wandb.place import Place
from lmbench.wandb.problem import IncompleteFile
from lmbench.wandb.transaction_log import history_count

DEFAULT_PROJECT = "lmbench"

_WANDB_INIT = ("entity", "name", "notes", "tags", "group", "job_type")


def import_wandb() -> Any:
    """The module. Raises ModuleNotFoundError."""
    import wandb

    if wandb.__file__ is None:
        # A folder of that name, from earlier runs in the working directory.
        raise ModuleNotFoundError("wandb", name="wandb")
    return wandb


def open_run(place: Place, run_id: str, name: str, filed: Record, config: Record) -> Any:
    """wandb's run, offline in a place; `filed` says under which project, group and so on, and another name."""
    wandb = import_wandb()
    # By itself wandb would leave what it keeps of tables in the user's home.
    os.environ["WANDB_DATA_DIR"] = str(place.staging)
    settings = wandb.Settings(
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
    )
    given = {name: filed[name] for name in _WANDB_INIT if filed.get(name) is not None}
    if "WANDB_NAME" not in os.environ:
        given.setdefault("name", name)
    project = filed.get("project") or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT
    return wandb.init(id=run_id, project=project, dir=str(place.result), config=config, settings=settings, **given)


def close_run(place: Place, wandb_run: Any, rows: int, is_ok: bool) -> None:
    """Close it, read it back, and note that it is complete; `rows` is how many were logged.

    Raises IncompleteFile, OSError, or whatever wandb raises.
    """
    folder, run_id = Path(wandb_run.dir).parent, wandb_run.id
    wandb_run.finish(exit_code=0 if is_ok else 1)
    # Only when wandb's background process has ended is the file complete.
    import_wandb().teardown()
    file = folder / f"run-{run_id}.wandb"
    written = history_count(file)
    if written is not None and written != rows:
        # wandb itself says nothing of it: its writer logs the error and goes on.
        free_bytes = shutil.disk_usage(place.result).free
        raise IncompleteFile(f"wandb wrote {written} of {rows} steps; {free_bytes / 1e6:.1f} MB are free on the disk")
    for name in ("logs", "tmp"):
        shutil.rmtree(folder / name, ignore_errors=True)
    place.note_mirror(file, result=str(place.result.resolve()))
