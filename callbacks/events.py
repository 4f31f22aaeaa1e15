"""The events of a session, and callbacks that cost nothing in the hooks that they do not define."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Self, TypeAlias

from lightning.pytorch import Callback

from lmbench.instruments.window import ProbeKind
from lmbench.records.step import StepRecord

#: What a module's step returned, by name.
Outputs: TypeAlias = Mapping[str, Any]

#: The hooks that Lightning calls inside a training step.
STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class LeanCallback(Callback):
    """A callback whose instances have None for every step hook that their class lacks, which Lightning skips.

    Lightning would otherwise call the empty hooks through its profiler, 54 times a step for lmbench's nine callbacks.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        callback = super().__new__(cls)
        callback.listen(True)
        return callback

    def listen(self, is_on: bool) -> None:
        """Have Lightning call the step hooks of this callback, or skip them like those that its class lacks."""
        for hook in STEP_HOOKS:
            # The class keeps the empty hooks, which a subclass may call.
            if is_on and getattr(type(self), hook) is not getattr(Callback, hook):
                vars(self).pop(hook, None)
            else:
                setattr(self, hook, None)


class Events(LeanCallback):
    """The events of which a run's `MeasurementSession` notifies its observers, in the order of a run.

    An observer defines the methods of the events that it needs.
    """

    #: Probe steps that only this observer needs, one step an entry; they follow those of every run.
    own_probes: tuple[ProbeKind, ...] = ()
    #: Undoes what the observer has changed; closed at the end of the run, also after an exception.
    undo: ExitStack

    def run_started(self) -> None:
        """Prepare the run: its first batch is about to be fetched."""

    def before_window(self) -> None:
        """Do slow work: the window is about to open."""

    def window_opened(self) -> None:
        """Begin to measure, quickly: the device is idle, and the window's wall clock starts next."""

    def batch_ended(self, outputs: Outputs, batch: Any) -> None:
        """Look at a micro-batch that ended; `outputs` is what the module's step returned, a tensor as `loss`.

        Lightning has divided the loss of a training step by the micro-batches (`trainer.accumulate_grad_batches`).
        """

    def step_ended(self) -> None:
        """Look at an optimizer step that ended, of the session's `stage` and `probe_kind`."""

    def steps_recorded(self, records: list[StepRecord]) -> None:
        """Take the records of finished steps, which the timer hands over between two steps."""

    def between_steps(self) -> None:
        """Work between two steps of the same stage; the time spent here is in neither."""

    def window_closed(self) -> None:
        """Read what was measured: the window's wall clock has stopped on an idle device."""

    def probe_begins(self, kind: ProbeKind) -> None:
        """Prepare the probe steps of a kind."""

    def probe_ended(self, kind: ProbeKind) -> None:
        """Read what the probe steps of a kind examined."""

    def run_closing(self, exception: BaseException | None) -> None:
        """Record the last facts; called when the run is over, also after an exception. `undo` is closed next."""

    def run_ended(self, exception: BaseException | None) -> None:
        """Use the record of the run, in which every observer has recorded its facts.

        After an exception Lightning calls no other hook.
        """
