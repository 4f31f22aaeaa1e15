"""Write a result as an offline W&B run beside it: `python -m lmbench.board.mirror RESULT`, in a process of its own."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from lmbench.board.child import run_child
from lmbench.board.content import config_of, history_rows, summary_of, tables_of
from lmbench.board.held_run import LOGGED_FILE
from lmbench.board.place import Place
from lmbench.board.problem import BoardProblem
from lmbench.board.transaction_log import history_count
from lmbench.results.encoding import decode
from lmbench.results.load import Run, load_run
from lmbench.results.store import STEPS_FILE
from lmbench.results.vocabulary import Record

DEFAULT_PROJECT = "lmbench"

# Ten times what writing takes on a slow machine: about 0.3 ms and 0.7 kB a step.
_BASE_TIMEOUT_S = 60.0
_TIMEOUT_S_PER_BYTE = 5e-6

# Of W&B's variables only those that file a run. No key: an offline run needs none, so none can get into its files.
_FILING = ("PROJECT", "ENTITY", "NAME", "NOTES", "TAGS", "RUN_GROUP", "JOB_TYPE")
# Exit code where wandb cannot be imported.
_UNUSABLE = 5

_WANDB_INIT = ("entity", "name", "notes", "tags", "group", "job_type")


def ensure_mirror(result: Path) -> Path:
    """The offline run of a result, written if there is none yet; call it with the place locked.

    Returns the .wandb file. Raises BoardProblem.
    """
    place = Place(result)
    note = place.mirror
    # Tables and artifacts are named by their full paths: a result that was moved gets a new run of the same name.
    if note is None or note["result"] != str(result.resolve()):
        place.clear()
        _write_in_child(result)
        note = place.mirror
        if note is None:
            raise BoardProblem("the process that writes for wandb left nothing")
    return place.path / str(note["file"])


def _write_in_child(result: Path) -> None:
    steps = result / STEPS_FILE
    size_bytes = steps.stat().st_size if steps.is_file() else 0
    timeout_s = _BASE_TIMEOUT_S + _TIMEOUT_S_PER_BYTE * size_bytes
    with tempfile.TemporaryDirectory(prefix="lmbench-wandb-", ignore_cleanup_errors=True) as scratch:
        environment = _environment(Path(scratch), Place(result).staging)
        ended = run_child(__name__, str(result), environment=environment, timeout_s=timeout_s)
    if ended.exit_code == 0:
        return
    Place(result).clear()
    if ended.exit_code is None:
        raise BoardProblem(f"wandb did not finish within {timeout_s:.0f} s")
    raise BoardProblem(ended.last_line, is_general=ended.exit_code == _UNUSABLE)


def _environment(scratch: Path, staging: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    filing = {f"WANDB_{name}": os.environ[f"WANDB_{name}"] for name in _FILING if f"WANDB_{name}" in os.environ}
    # By itself wandb would leave both in the user's home.
    folders = {"WANDB_CACHE_DIR": str(scratch), "WANDB_DATA_DIR": str(staging)}
    return {**kept, **filing, **folders, "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}


def main(argv: list[str]) -> int:
    """Write the mirror of one result; on failure the last line printed says why."""
    # A full disk would otherwise be told of again with every line that wandb logs.
    logging.raiseExceptions = False
    try:
        write_mirror(Path(argv[0]))
    except BaseException as exc:
        print(f"\n{_reason(exc)}", flush=True)
        return _UNUSABLE if isinstance(exc, ImportError) else 1
    return 0


def _reason(exc: BaseException) -> str:
    if isinstance(exc, BoardProblem):
        return str(exc)
    if isinstance(exc, OSError) and exc.errno == errno.ENOSPC:
        return "the disk is full"
    text = " ".join(str(exc).split())
    if isinstance(exc, ModuleNotFoundError) and exc.name == "wandb":
        return "wandb is not installed"
    return f"wandb failed with {type(exc).__name__}: {text}"


def write_mirror(result: Path) -> None:
    """Write the offline run in this process, read it back, and note that it is complete.

    Raises BoardProblem, OSError, or whatever wandb raises.
    """
    wandb = _wandb()
    loaded = load_run(result)
    filed = loaded.run.get("wandb") or {}
    logged_config, logged_rows = _read_logged(result)
    place = Place(result)
    wandb_run = _open(place, loaded, filed, logged_config)
    folder, run_id = Path(wandb_run.dir).parent, wandb_run.id
    rows = _log(wandb_run, loaded, logged_rows)
    if filed.get("artifact"):
        _log_artifact(wandb_run, loaded)
    wandb_run.finish(exit_code=0 if loaded.outcome == "ok" else 1)
    # Only when wandb's background process has ended is the file complete.
    wandb.teardown()
    file = folder / f"run-{run_id}.wandb"
    written = history_count(file)
    if written is not None and written != rows:
        # wandb itself says nothing of it: its writer logs the error and goes on.
        free_bytes = shutil.disk_usage(result).free
        raise BoardProblem(f"wandb wrote {written} of {rows} steps; {free_bytes / 1e6:.1f} MB are free on the disk")
    for name in ("logs", "tmp"):
        shutil.rmtree(folder / name, ignore_errors=True)
    place.note_mirror(file, result=str(result.resolve()))


def _wandb() -> Any:
    import wandb

    if wandb.__file__ is None:
        # A folder of that name, from earlier runs in the working directory.
        raise ModuleNotFoundError("wandb", name="wandb")
    return wandb


def _open(place: Place, loaded: Run, filed: Record, logged_config: Record) -> Any:
    wandb = _wandb()
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
    # Its own, not the folder's name, which may have been changed since.
    run_id = loaded.run.get("run_id") or loaded.run_id
    given = {name: filed[name] for name in _WANDB_INIT if filed.get(name) is not None}
    if "WANDB_NAME" not in os.environ:
        given.setdefault("name", run_id)
    project = filed.get("project") or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT
    return wandb.init(
        id=filed.get("id") or run_id,
        project=project,
        dir=str(place.result),
        config={**config_of(loaded.run), **{f"logged.{name}": value for name, value in logged_config.items()}},
        settings=settings,
        **given,
    )


def _log(wandb_run: Any, loaded: Run, logged_rows: list[Record]) -> int:
    """Everything of the result that W&B shows; returns how many rows there are."""
    wandb = _wandb()
    wandb_run.define_metric("step", summary="none")
    wandb_run.define_metric("*", step_metric="step", summary="none")
    for row in history_rows(loaded.steps):
        wandb_run.log(row)
    if logged_rows:
        # The module's own names may be the registry's: they get a place of their own, and Lightning's x-axis.
        wandb_run.define_metric("logged/*", step_metric="logged/trainer/global_step", summary="last")
    for row in logged_rows:
        wandb_run.log({f"logged/{name}": value for name, value in row.items()})
    tables = {t.name: wandb.Table(columns=list(t.columns), data=t.rows) for t in tables_of(loaded.run)}
    wandb_run.summary.update({**summary_of(loaded.run, loaded.outcome), **tables})
    return len(loaded.steps) + len(logged_rows)


def _log_artifact(wandb_run: Any, loaded: Run) -> None:
    artifact = _wandb().Artifact(f"result-{wandb_run.id}", type="lmbench-result")
    for path in sorted(loaded.path.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            # By name: a copy would lie in the user's home until it is uploaded.
            artifact.add_file(str(path), policy="immutable")
    wandb_run.log_artifact(artifact)


def _read_logged(result: Path) -> tuple[Record, list[Record]]:
    try:
        lines = (result / LOGGED_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}, []
    first, *rows = [decode(line) for line in lines]
    return first.get("config") or {}, [{k: v for k, v in row.items() if v is not None} for row in rows]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
