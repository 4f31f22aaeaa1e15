"""What a profiled run's own trace says goes into its record, once the run is closed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from lmbench.callbacks import RunRecorder
from lmbench.errors import UsageError
from lmbench.kernels.trace.analysis import load_trace
from lmbench.kernels.trace.findings import findings_of
from lmbench.kernels.trace.step_timeline import step_timeline, write_timeline
from lmbench.kernels.trace.summary import summarize, without_kernels
from lmbench.records.guard import Guard
from lmbench.records.kernels import KernelSummary

Summary = tuple[dict[str, Any], list[Guard]]


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
        reason = str(fault) if isinstance(fault, UsageError) else f"{type(fault).__name__}: {fault}"
        _say(folder.path, reason)
        kernels, guards = without_kernels(f"the trace could not be examined: {' '.join(reason.split())[:200]}"), []
    try:
        recorder.complete(msgspec.convert(kernels, KernelSummary), guards)
    except OSError as error:
        _say(folder.path, f"run.json cannot be written: {error.strerror}")


def examine_run(folder: Path) -> Summary:
    """The summary of the trace in a run's folder and its guards; writes the step's timeline beside it.

    Raises UsageError for a trace that cannot be read.
    """
    trace = load_trace(folder)
    found = findings_of(trace)
    if (timeline := step_timeline(trace)) is not None:
        write_timeline(timeline, folder)
    return summarize(found), found.guards


def _say(folder: Path, reason: str) -> None:
    why = " ".join(reason.split())
    print(
        f"lmbench: the run is complete, its trace is not examined: {why}; `lmbench kernels {folder}`", file=sys.stderr
    )
