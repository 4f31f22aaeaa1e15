"""What was predicted of a run's memory goes into its record, once the run is closed and there is something to hold it
against. Of a run that ran out of memory there is the prediction alone."""

from __future__ import annotations

from lmbench.callbacks import RunRecorder
from lmbench.errors import UsageError, tell
from lmbench.hardware import find_gpu
from lmbench.memory.asking import PredictionFailed, Request, ask_forecast
from lmbench.memory.forecast import Forecast, Gpu
from lmbench.records.field import PerPhase
from lmbench.records.prediction import MemoryPrediction
from lmbench.records.run import RunRecord

_OUTCOMES = ("ok", "oom")
#: As on GPUs before Hopper; the run may have one that is in no table.
_UNKNOWN_WORKSPACE_BYTES = 8_519_680


def add_prediction(recorder: RunRecorder) -> None:
    """Complete the record with a prediction by the run's configuration; whatever goes wrong, the run stays as it is.

    Training is predicted, so a run of `lmbench validate` is told that it has none.
    """
    folder, run = recorder.folder, recorder.run
    if folder is None or run.outcome not in _OUTCOMES:
        return
    try:
        if run.command != "fit":
            raise UsageError(f"{run.command} trains nothing; lmbench fit does")
        words = ["--config", str(folder.path / "config.yaml")]
        made = ask_forecast(words, Request(_gpu_of(run), finds_largest=False))
        prediction = _as_record(made, run.memory.steady_peak_allocated_bytes)
    except (UsageError, PredictionFailed) as error:
        prediction = MemoryPrediction(reason=str(error)[:200])
        tell(f"the run is complete, its memory is not predicted: {error}")
    try:
        recorder.complete([], memory_prediction=prediction)
    except OSError as error:
        tell(f"the run is complete, its prediction cannot be written: {error.strerror}")


def _gpu_of(run: RunRecord) -> Gpu | None:
    name = run.environment.gpu.name if run.environment is not None else None
    if name is None or run.device_type != "cuda":
        return None
    known = find_gpu(name)
    workspace_bytes = known.matmul_workspace_bytes if known else _UNKNOWN_WORKSPACE_BYTES
    return Gpu(name, run.memory.device_total_bytes or 0, workspace_bytes, is_here=True)


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
