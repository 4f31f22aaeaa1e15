"""What is worked out once a run is closed goes into its record: from its trace, its memory's history, its prediction.

Whatever goes wrong there, the run stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lmbench.callbacks import RunRecorder
from lmbench.errors import UsageError, tell
from lmbench.kernels.trace.findings import examine_run as examine_trace
from lmbench.memory.asking import PredictionFailed, Request, ask_forecast, gpu_of
from lmbench.memory.forecast import Forecast
from lmbench.memory.history.summary import examine_run as examine_history
from lmbench.records.field import PerPhase
from lmbench.records.guard import Guard
from lmbench.records.kernels import KernelSummary
from lmbench.records.memory import MemoryHistoryRecord
from lmbench.records.prediction import MemoryPrediction

_Part = TypeVar("_Part", KernelSummary, MemoryHistoryRecord, MemoryPrediction)


def add_kernels(recorder: RunRecorder) -> None:
    """Complete the record with `kernels` and the trace's guards.

    Nothing happens without a trace, or where the run did not end well: it may be large, and nobody waits for it.
    """
    folder, run = recorder.folder, recorder.run
    if folder is None or run.outcome != "ok" or run.profile is None or not run.profile.trace_file:
        return
    _complete(
        recorder,
        lambda reason: f"its trace is not examined: {reason}; `lmbench kernels {folder.path}`",
        lambda: examine_trace(folder.path),
        lambda reason: KernelSummary(reason=f"the trace could not be examined: {reason}"),
    )


def add_memory(recorder: RunRecorder) -> None:
    """Complete the record with the history's figures and guards."""
    folder, run = recorder.folder, recorder.run
    history = run.memory_history
    if folder is None or run.outcome not in ("ok", "oom") or history is None or not history.snapshot_file:
        return

    def unexamined(reason: str) -> MemoryHistoryRecord:
        history.reason = f"the snapshot could not be examined: {reason}"
        return history

    _complete(
        recorder,
        lambda reason: f"its memory is not examined: {reason}; `lmbench memory {folder.path}`",
        lambda: (history, examine_history(folder.path, history)),
        unexamined,
    )


def add_prediction(recorder: RunRecorder) -> None:
    """Complete the record with a prediction by the run's configuration, to hold its peak against. Of a run that ran out
    of memory there is the prediction alone.

    Training is predicted, so a run of `lmbench validate` is told that it has none.
    """
    folder, run = recorder.folder, recorder.run
    if folder is None or run.outcome not in ("ok", "oom"):
        return
    _complete(
        recorder,
        lambda reason: f"its memory is not predicted: {reason}",
        lambda: (_predicted(recorder, folder.path), []),
        lambda reason: MemoryPrediction(reason=reason),
    )


def _complete(
    recorder: RunRecorder,
    failed: Callable[[str], str],
    examine: Callable[[], tuple[_Part, list[Guard]]],
    unexamined: Callable[[str], _Part],
) -> None:
    """By a reason, `failed` tells what is missing then, and `unexamined` is what the record has instead."""
    try:
        part, guards = examine()
    except (KeyboardInterrupt, SystemExit):
        tell(f"the run is complete, {failed('interrupted')}")
        return
    except Exception as fault:
        is_told = isinstance(fault, (UsageError, PredictionFailed))
        reason = " ".join((str(fault) if is_told else f"{type(fault).__name__}: {fault}").split())
        tell(f"the run is complete, {failed(reason)}")
        part, guards = unexamined(reason[:200]), []
    try:
        recorder.complete(part, guards)
    except OSError as error:
        tell(f"the run is complete, {failed(f'run.json cannot be written: {error.strerror}')}")


def _predicted(recorder: RunRecorder, folder: Path) -> MemoryPrediction:
    run = recorder.run
    if run.command != "fit":
        raise UsageError(f"{run.command} trains nothing; lmbench fit does")
    request = Request(gpu_of(run), finds_largest=False)
    made = ask_forecast(["--config", str(folder / "config.yaml")], request)
    return _as_record(made, run.memory.steady_peak_allocated_bytes)


def _as_record(made: Forecast, measured_bytes: int | None) -> MemoryPrediction:
    phases: PerPhase[int] = PerPhase()
    for one in made.phases:
        phases.set(one.phase, one.peak.total_bytes)
    peak_bytes = made.highest.peak.total_bytes
    return MemoryPrediction(
        method=made.method,
        peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=made.reserved_bytes,
        phase_peak_allocated_bytes=phases,
        error_fraction=peak_bytes / measured_bytes - 1 if measured_bytes else None,
    )
