"""What the history of a run's allocator says goes into its record, once the run is closed."""

from __future__ import annotations

import sys
from pathlib import Path

from lmbench.callbacks import RunRecorder
from lmbench.errors import UsageError
from lmbench.memory.history.summary import examine_run


def add_memory(recorder: RunRecorder) -> None:
    """Complete the record with the history's figures and guards; whatever goes wrong, the run stays as it is."""
    folder, run = recorder.folder, recorder.run
    history = run.memory_history
    if folder is None or run.outcome not in ("ok", "oom") or history is None or not history.snapshot_file:
        return
    try:
        guards = examine_run(folder.path, history)
    except (KeyboardInterrupt, SystemExit):
        _say(folder.path, "interrupted")
        return
    except Exception as fault:
        reason = " ".join((str(fault) if isinstance(fault, UsageError) else f"{type(fault).__name__}: {fault}").split())
        _say(folder.path, reason)
        history.reason, guards = f"the snapshot could not be examined: {reason[:200]}", []
    try:
        recorder.complete(guards, memory_history=history)
    except OSError as error:
        _say(folder.path, f"run.json cannot be written: {error.strerror}")


def _say(folder: Path, reason: str) -> None:
    print(
        f"lmbench: the run is complete, its memory is not examined: {reason}; `lmbench memory {folder}`",
        file=sys.stderr,
    )
