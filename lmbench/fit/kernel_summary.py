"""What a profiled run's own trace says goes into its record, once the run is closed."""

from __future__ import annotations

from pathlib import Path

from lmbench.callbacks import RunRecorder
from lmbench.errors import UsageError, tell
from lmbench.kernels.trace.findings import examine_run
from lmbench.records.kernels import KernelSummary


def add_kernels(recorder: RunRecorder) -> None:
    """Complete the record with `kernels` and the trace's guards; whatever goes wrong, the run stays as it is.

    Nothing happens without a trace, or where the run did not end well: it may be large, and nobody waits for it.
    """
    folder, run = recorder.folder, recorder.run
    if folder is None or run.outcome != "ok" or run.profile is None or not run.profile.trace_file:
        return
    try:
        kernels, guards = examine_run(folder.path)
    except (KeyboardInterrupt, SystemExit):
        _say(folder.path, "interrupted")
        return
    except Exception as fault:
        reason = " ".join((str(fault) if isinstance(fault, UsageError) else f"{type(fault).__name__}: {fault}").split())
        _say(folder.path, reason)
        kernels, guards = KernelSummary(reason=f"the trace could not be examined: {reason[:200]}"), []
    try:
        recorder.complete(guards, kernels=kernels)
    except OSError as error:
        _say(folder.path, f"run.json cannot be written: {error.strerror}")


def _say(folder: Path, reason: str) -> None:
    tell(f"the run is complete, its trace is not examined: {reason}; `lmbench kernels {folder}`")
