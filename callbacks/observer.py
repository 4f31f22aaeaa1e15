"""What every measuring callback is, an observer of its run's session; and what the Trainer's loggers get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lmbench.errors import tell
from lmbench.instruments.window import ProbeKind
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.summary import summarize_steps
from lmbench.records.vocabulary import RUNNING
from lmbench.report.logged import of_run, of_step

if TYPE_CHECKING:
    from lmbench.callbacks.session import MeasurementSession

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
    """A callback whose class leaves a step hook that it does not define at None, which Lightning skips.

    Otherwise Lightning calls the empty hook of every callback through its profiler, 54 times a step for lmbench's nine.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for hook in STEP_HOOKS:
            if getattr(cls, hook) is getattr(Callback, hook):
                setattr(cls, hook, None)


class Observer(LeanCallback):
    """A measuring callback: hears of the window and the probe steps from the run's `MeasurementSession`.

    Alone in a stranger's Trainer the first observer attaches a session that only watches: warm-up of 5 steps, then a
    window until training ends, no probe steps, nothing stopped. What was attached is gone when the run is over; every
    further `fit`, `validate` or `test` is a run of its own, and facts and records are those of the latest.

    Of these methods it has those of the events that it wants to hear of, in the order of a run:

    - `run_started()`: the first batch is about to be fetched.
    - `before_window()`: the window is about to open; slow work belongs here.
    - `window_opened()`: the device is idle and the window's wall clock starts next; be quick.
    - `batch_ended(outputs, batch)`: a micro-batch ended; `outputs` is what the module's step returned.
    - `step_ended(stage, kind)`: an optimizer step ended, in a Stage, and of probe steps in a ProbeKind, else None.
    - `steps_recorded(records)`: the timer hands over the StepRecords of finished steps, outside of every step.
    - `between_steps()`: a step is over and the next one belongs to the same stage; work here is taken out of both.
    - `window_closed()`: the window's wall clock has stopped on an idle device.
    - `probe_begins(kind)`, `probe_ended(kind)`: around the steps that look at a ProbeKind.
    - `run_ended(exception)`: the run is over, and every observer has left its facts (`run_closing`). After an exception
      Lightning calls no other hook.
    """

    #: Kinds of probe steps that nobody else needs; they come after the others, one step each.
    own_probes: tuple[ProbeKind, ...] = ()

    trainer: Trainer
    module: LightningModule
    _session: MeasurementSession | None = None

    @property
    def session(self) -> MeasurementSession:
        assert self._session is not None
        return self._session

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # The session tells its observers, so its module imports this one.
        from lmbench.callbacks.session import MeasurementSession

        self.trainer, self.module = trainer, pl_module
        self._session = MeasurementSession.of(trainer)
        if self not in self.session.observers:
            self.session.observers.append(self)
        self.prepare()

    def prepare(self) -> None:
        """A run is set up: forget the one before."""

    def run_closing(self, exception: BaseException | None) -> None:
        """The run is over, by itself or by an exception: leave the last facts, take away what was put anywhere."""

    def since_step_s(self) -> float | None:
        """Seconds from the end of the last step to now, from whoever times steps; the device is idle."""
        return None

    def is_settled(self) -> bool:
        """Whether the run is again in the state it had in the window, after the synchronize at its end."""
        return True


#: In front of every name, so that none is one of the user's own.
PREFIX = "lmbench/"


class LoggerSink(Observer):
    """Hands what was measured to every logger of the Trainer when the run is over, outside of every step.

    The session brings it, last of all observers, where the Trainer has a logger.

    Logs, for each of the last 10 000 steps of warm-up and window at its global step, `lmbench/<series>` for every
    series of lmbench.report.logged, the names that W&B gets of a run of `lmbench fit` (`lmbench/time/step_ms`,
    `lmbench/train/loss`); then at the last of them `lmbench/summary/<name>` for the numbers that decide: the means of
    the phases and, where a RunRecorder closed a record, throughput, memory and the rest.
    A logger that fails costs one line on standard error.
    """

    def __init__(self, session: MeasurementSession, trainer: Trainer) -> None:
        self._session, self._trainer = session, trainer
        # Where a run goes on from a checkpoint, its steps go on too.
        self._global_step = trainer.global_step
        self._has_told = False

    def run_ended(self, exception: BaseException | None) -> None:
        records = self.session.records
        # An exception may still follow the end of a run.
        if not self._trainer.is_global_zero or not records or self._has_told:
            return
        self._has_told = True
        run = self.session.run
        if run.outcome == RUNNING:
            # No RunRecorder has closed it.
            run = RunRecord(SCHEMA_VERSION, RUNNING, phases=summarize_steps(records))
        rows = [(PREFIX, of_step(record, run), record.step or 0) for record in records]
        rows.append((f"{PREFIX}summary/", of_run(run), records[-1].step or 0))
        for logger in self._trainer.loggers:
            try:
                for prefix, values, step in rows:
                    metrics = {f"{prefix}{name}": value for name, value in values.items()}
                    logger.log_metrics(metrics, self._global_step + step)
            # The measurement is over and kept elsewhere; whatever a logger raises is its own affair.
            except Exception as fault:
                reason = " ".join(f"{type(fault).__name__}: {fault}".split())
                tell(f"{type(logger).__name__} did not take what was measured: {reason}")
