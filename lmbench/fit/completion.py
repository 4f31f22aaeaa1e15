"""What is worked out once a run is closed goes into its record: from its trace, its memory's history, its prediction.

Whatever goes wrong there, the run stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from lmbench.callbacks import RunRecorder
from lmbench.errors import UsageError, tell
from lmbench.memory.forecast import Request, ask_forecast, gpu_of
from lmbench.python_process import ProcessFailed
from lmbench.records.field import PerPhase
from lmbench.records.guard import Guard
from lmbench.records.instruments import MemoryPrediction
from lmbench.records.passes import PASSES


def complete_record(recorder: RunRecorder, is_predicted: bool = False) -> None:
    """Complete a closed run's record with what its passes recorded, and with a prediction of its memory.

    A run that did not end well is left as it is: a trace may be large, and nobody waits for it.
    """
    run = recorder.run
    if recorder.folder is None:
        return
    for look in PASSES:
        if look.reader and run.outcome in look.outcomes and look.recorded(run):
            record = getattr(run, look.field) or look.content()
            failure = f"the {look.noun} could not be examined"
            _complete(recorder, look.field, record, failure, resolve_name(look.reader))
    if is_predicted and run.outcome in ("ok", "oom"):
        failure = "its memory could not be predicted"
        _complete(recorder, "memory_prediction", MemoryPrediction(), failure, lambda path: _prediction(recorder, path))


def _complete(
    recorder: RunRecorder,
    field: str,
    unread: Any,
    failure: str,
    read: Callable[[Path], tuple[Any, list[Guard]]],
) -> None:
    """Read, and write what was read into the record's `field`; `unread` with its reason where that fails."""
    assert recorder.folder is not None
    reason = ""
    try:
        try:
            part, guards = read(recorder.folder.path)
        except Exception as fault:
            is_expected = isinstance(fault, UsageError | ProcessFailed)
            reason = " ".join((str(fault) if is_expected else f"{type(fault).__name__}: {fault}").split())
            unread.reason = f"{failure}: {reason[:200]}"
            part, guards = unread, []
        recorder.complete(field, part, guards)
    except OSError as error:
        reason = f"run.json cannot be written: {error.strerror}"
    except (KeyboardInterrupt, SystemExit):
        reason = "interrupted"
    if reason:
        tell(f"the run is complete; {failure}: {reason}")


def _prediction(recorder: RunRecorder, path: Path) -> tuple[MemoryPrediction, list[Guard]]:
    """A prediction by the run's configuration, to hold its peak against; of a run that ran out of memory the prediction
    alone.

    Raises:
        UsageError: the run is one of `lmbench validate`, which trains nothing.
        ProcessFailed: the predicting process failed.
    """
    run = recorder.run
    if run.command != "fit":
        raise UsageError(f"{run.command} trains nothing; lmbench fit does")
    request = Request(gpu_of(run), finds_largest=False)
    forecast = ask_forecast(["--config", str(path / "config.yaml")], request)
    phases: PerPhase[int] = PerPhase()
    for peak in forecast.phases:
        phases.set(peak.phase, peak.total_bytes)
    peak_bytes, measured_bytes = forecast.highest.total_bytes, run.memory.steady_peak_allocated_bytes
    prediction = MemoryPrediction(
        method=forecast.method,
        peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=forecast.reserved_bytes,
        phase_peak_allocated_bytes=phases,
        error_fraction=peak_bytes / measured_bytes - 1 if measured_bytes else None,
    )
    return prediction, []
