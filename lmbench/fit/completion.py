"""What is worked out once a run is closed goes into its record: from its trace, its memory's history, its prediction.

Whatever goes wrong there, the run stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from lmbench.callbacks import RunRecorder
from lmbench.errors import UsageError, tell
from lmbench.memory.forecast import PredictionFailed, Request, ask_forecast, gpu_of
from lmbench.records.field import PerPhase
from lmbench.records.guard import Guard
from lmbench.records.instruments import MemoryPrediction
from lmbench.records.passes import PASSES


def complete_record(recorder: RunRecorder, is_predicted: bool = False) -> None:
    """Complete a closed run's record with what its passes recorded, and with a prediction of its memory.

    A run that did not end well is left as it is: a trace may be large, and nobody waits for it.
    """
    folder, run = recorder.folder, recorder.run
    if folder is None:
        return
    for look in PASSES:
        if look.reader and run.outcome in look.outcomes and look.recorded(run):
            record = getattr(run, look.field) or look.content()
            what = f"its {look.noun} is not examined"
            hint = f"; `lmbench {look.command} {folder.path}`"
            reader = resolve_name(look.reader)
            _complete(recorder, look.field, record, f"the {look.noun} could not be examined: ", what, hint, reader)
    if is_predicted and run.outcome in ("ok", "oom"):
        record = MemoryPrediction()
        what = "its memory is not predicted"
        _complete(recorder, "memory_prediction", record, "", what, "", lambda _: (_prediction(recorder), []))


def _complete(
    recorder: RunRecorder,
    field: str,
    unread: Any,
    unread_because: str,
    what_is_missing: str,
    hint: str,
    read: Callable[[Any], tuple[Any, list[Guard]]],
) -> None:
    """Read, and write what was read into the record's `field`; `unread` with its reason where that fails."""
    assert recorder.folder is not None
    try:
        part, guards = read(recorder.folder.path)
    except (KeyboardInterrupt, SystemExit):
        tell(f"the run is complete, {what_is_missing}: interrupted{hint}")
        return
    except Exception as fault:
        is_expected = isinstance(fault, (UsageError, PredictionFailed))
        reason = " ".join((str(fault) if is_expected else f"{type(fault).__name__}: {fault}").split())
        tell(f"the run is complete, {what_is_missing}: {reason}{hint}")
        part, guards = unread, []
        part.reason = unread_because + reason[:200]
    try:
        recorder.complete(field, part, guards)
    except OSError as error:
        tell(f"the run is complete, {what_is_missing}: run.json cannot be written: {error.strerror}{hint}")


def _prediction(recorder: RunRecorder) -> MemoryPrediction:
    """A prediction by the run's configuration, to hold its peak against; of a run that ran out of memory the prediction
    alone.

    Raises:
        UsageError: the run is one of `lmbench validate`, which trains nothing.
        PredictionFailed: the predicting process failed.
    """
    run = recorder.run
    assert recorder.folder is not None
    if run.command != "fit":
        raise UsageError(f"{run.command} trains nothing; lmbench fit does")
    forecast = ask_forecast(
        ["--config", str(recorder.folder.path / "config.yaml")], Request(gpu_of(run), finds_largest=False)
    )
    phases: PerPhase[int] = PerPhase()
    for each in forecast.phases:
        phases.set(each.phase, each.total_bytes)
    peak_bytes, measured_bytes = forecast.highest.total_bytes, run.memory.steady_peak_allocated_bytes
    return MemoryPrediction(
        method=forecast.method,
        peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=forecast.reserved_bytes,
        phase_peak_allocated_bytes=phases,
        error_fraction=peak_bytes / measured_bytes - 1 if measured_bytes else None,
    )
