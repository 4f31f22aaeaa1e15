"""Write results as offline W&B runs beside them: `python -m lmbench.wandb.mirror RESULT...`, in a process of its own.

A result is a run's folder or a sweep's.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmbench.records.encoding import decode
from lmbench.records.load import Run, load_run
from lmbench.records.store import STEPS_FILE, SWEEP_FILE
from lmbench.records.vocabulary import Record
from lmbench.wandb.child import run_child
from lmbench.wandb.content import config_of, history_rows, summary_of, tables_of
from lmbench.wandb.held_run import LOGGED_FILE
from lmbench.wandb.offline_run import close_run, import_wandb, open_run
from lmbench.wandb.place import Place
from lmbench.wandb.problem import BoardProblem, IncompleteFile
from lmbench.wandb.sweep_mirror import write_sweep_mirror

# Ten times what writing takes on a slow machine: about 0.3 ms and 0.7 kB a step.
_BASE_TIMEOUT_S = 60.0
_TIMEOUT_S_PER_BYTE = 5e-6
_TIMEOUT_S_PER_RESULT = 5.0

# Of W&B's variables only those that file a run. No key: an offline run needs none, so none can get into its files.
_FILING = ("PROJECT", "ENTITY", "NAME", "NOTES", "TAGS", "RUN_GROUP", "JOB_TYPE")
# Exit code where wandb cannot be imported.
_UNUSABLE = 5


def ensure_mirror(result: Path) -> Path:
    """The offline run of a result, written if there is none yet; call it with the place locked.

    Returns the .wandb file. Raises BoardProblem.
    """
    ensure_mirrors([result])
    place = Place(result)
    note = place.mirror
    if note is None:
        raise BoardProblem("the process that writes for wandb left nothing")
    return place.path / str(note["file"])


def ensure_mirrors(results: Sequence[Path]) -> None:
    """The same for many, by one process; those before the first that fails are complete. Raises BoardProblem."""
    missing = [result for result in results if not _is_current(Place(result))]
    for result in missing:
        Place(result).clear()
    if missing:
        _write_in_child(missing)


def _is_current(place: Place) -> bool:
    note = place.mirror
    # Tables and artifacts are named by their full paths: a result that was moved gets a new run of the same name.
    return note is not None and bool(note["result"] == str(place.result.resolve()))


def _write_in_child(results: Sequence[Path]) -> None:
    sizes_bytes = [path.stat().st_size for result in results if (path := result / STEPS_FILE).is_file()]
    timeout_s = _BASE_TIMEOUT_S + _TIMEOUT_S_PER_BYTE * sum(sizes_bytes) + _TIMEOUT_S_PER_RESULT * (len(results) - 1)
    with tempfile.TemporaryDirectory(prefix="lmbench-wandb-", ignore_cleanup_errors=True) as scratch:
        words = map(str, results)
        ended = run_child(__name__, *words, environment=_environment(scratch), timeout_s=timeout_s)
    if ended.exit_code == 0:
        return
    for place in map(Place, results):
        if place.mirror is None:
            place.clear()
    if ended.exit_code is None:
        raise BoardProblem(f"wandb did not finish within {timeout_s:.0f} s")
    raise BoardProblem(ended.last_line, is_general=ended.exit_code == _UNUSABLE)


def _environment(scratch: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    filing = {f"WANDB_{name}": os.environ[f"WANDB_{name}"] for name in _FILING if f"WANDB_{name}" in os.environ}
    # By itself wandb would leave its cache in the user's home.
    own = {"WANDB_CACHE_DIR": scratch, "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    return {**kept, **filing, **own}


def main(argv: list[str]) -> int:
    """Write the mirrors of results, up to the first that fails; the last line printed says why."""
    # A full disk would otherwise be told of again with every line that wandb logs.
    logging.raiseExceptions = False
    try:
        for result in argv:
            _write_complete(Path(result))
    except BaseException as exc:
        print(f"\n{_reason(exc)}", flush=True)
        return _UNUSABLE if isinstance(exc, ImportError) else 1
    return 0


def _write_complete(result: Path) -> None:
    """A file that lacks steps was seen once on a busy machine, with nothing the matter with disk or result."""
    try:
        write_mirror(result)
    except IncompleteFile:
        Place(result).clear()
        write_mirror(result)


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
    if (result / SWEEP_FILE).is_file():
        write_sweep_mirror(result)
        return
    loaded = load_run(result)
    filed = loaded.run.get("wandb") or {}
    logged_config, logged_rows = _read_logged(result)
    place = Place(result)
    config = {**config_of(loaded.run), **{f"logged.{name}": value for name, value in logged_config.items()}}
    # Its own id, not the folder's name, which may have been changed since.
    run_id = loaded.run.get("run_id") or loaded.run_id
    wandb_run = open_run(place, filed.get("id") or run_id, run_id, filed, config)
    rows = _log(wandb_run, loaded, logged_rows)
    if filed.get("artifact"):
        _log_artifact(wandb_run, loaded)
    close_run(place, wandb_run, rows, is_ok=loaded.outcome == "ok")


def _log(wandb_run: Any, loaded: Run, logged_rows: list[Record]) -> int:
    """Everything of the result that W&B shows; returns how many rows there are."""
    wandb = import_wandb()
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
    artifact = import_wandb().Artifact(f"result-{wandb_run.id}", type="lmbench-result")
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
