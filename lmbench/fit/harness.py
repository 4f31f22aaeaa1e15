"""What a measurement puts around a Trainer, whoever describes it: a command line or a call."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback

from lmbench.callbacks import (
    GradientNorm,
    MeasurementSession,
    MemoryRecorder,
    ProgressLine,
    QuietHost,
    RunRecorder,
    SyncFinder,
    ThroughputMeter,
    TrainingCheck,
)
from lmbench.errors import UsageError
from lmbench.fit.announcement import Announcement
from lmbench.instruments.schedule import Schedule


def measuring_callbacks(
    recorder: RunRecorder,
    schedule: Schedule,
    given: Sequence[Callback] = (),
    *,
    before: Sequence[Callback] = (),
    with_gradient_norm: bool = False,
    announces: bool = False,
) -> list[Callback]:
    """The callbacks of a measured Trainer, in their order.

    Args:
        recorder: writes the result.
        schedule: of the measurement.
        given: the user's own.
        before: come in front of all, so that switching them on and off lies outside of what the timer sees.
        with_gradient_norm: record every step's.
        announces: print what is about to be measured, and how far it is.
    """
    return [
        *before,
        *given,
        QuietHost(),
        MemoryRecorder(),
        TrainingCheck(),
        SyncFinder(),
        *([GradientNorm()] if with_gradient_norm else []),
        # Last of those that work before the window, so that its power reading is next to the window's start.
        ThroughputMeter(),
        recorder,
        *([Announcement(recorder), ProgressLine()] if announces else []),
        MeasurementSession(schedule),
    ]


def check_measured(recorder: RunRecorder) -> None:
    """Lightning came back; without a batch it has called no hook of the loop's.

    Raises:
        UsageError: nothing was measured.
    """
    if recorder.exit_code is None:
        raise UsageError("nothing was measured: no batch was taken (empty data, or max_epochs or a limit is 0)")
