"""The base class of measuring callbacks, and the observer that writes to the Trainer's loggers."""

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
    """A callback that sets every step hook its class does not define to None, which Lightning skips.

    Lightning would otherwise call the empty hooks through its profiler, 54 times a step for lmbench's nine callbacks.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for hook in STEP_HOOKS:
            if getattr(cls, hook) is getattr(Callback, hook):
                setattr(cls, hook, None)


class Observer(LeanCallback):
    """A measuring callback, which the run's `MeasurementSession` notifies of the window and the probe steps.

    In a Trainer without a session the first observer attaches one that only watches: 5 warm-up steps, then a window
    until training ends. It takes no probe steps, stops nothing, and is removed when the run is over. Every further
    `fit`, `validate` or `test` is a new run; facts and records are those of the latest.

    A subclass defines the methods of the events it needs. In the order of a run these are:

    - `run_started()`: the first batch is about to be fetched.
    - `before_window()`: the window is about to open; slow work belongs here.
    - `window_opened()`: the device is idle and the window's wall clock starts next; be quick.
    - `batch_ended(outputs, batch)`: a micro-batch ended; `outputs` is the return value of the module's step.
    - `step_ended(stage, kind)`: an optimizer step ended; `kind` is a probe step's ProbeKind, else None.
    - `steps_recorded(records)`: the timer hands over the StepRecords of finished steps, between two steps.
    - `between_steps()`: the last and the next step belong to the same stage; the time spent here is in neither.
    - `window_closed()`: the window's wall clock has stopped on an idle device.
    - `probe_begins(kind)`, `probe_ended(kind)`: before and after the probe steps of a ProbeKind.
    - `run_ended(exception)`: the run is over, and every observer has recorded its facts in `run_closing`. After an
      exception Lightning calls no other hook.
    """

    #: Probe steps that only this observer needs, one step an entry; they follow those of every run.
    own_probes: tuple[ProbeKind, ...] = ()

    trainer: Trainer
    module: LightningModule
    _session: MeasurementSession | None = None

    @property
    def session(self) -> MeasurementSession:
        assert self._session is not None
        return self._session

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Imported here, because the session's module imports this one.
        from lmbench.callbacks.session import MeasurementSession

        self.trainer, self.module = trainer, pl_module
        self._session = MeasurementSession.of(trainer)
        if self not in self.session.observers:
            self.session.observers.append(self)
        self.prepare()

    def prepare(self) -> None:
        """Forget the previous run; called when a run is set up."""

    def run_closing(self, exception: BaseException | None) -> None:
        """Record the last facts and remove every hook; called when the run is over, also after an exception."""

    def since_step_s(self) -> float | None:
        """Seconds from the end of the last step to now, on an idle device; None from observers that time no steps."""
        return None

    def is_settled(self) -> bool:
        """Whether the run is in the window's steady state again, after the synchronize at the window's end."""
        return True


#: Begins every logged name, so that none is equal to one of the user's.
PREFIX = "lmbench/"


class LoggerSink(Observer):
    """Logs the measured steps and their summary to every logger of the Trainer when the run is over.

    The session adds it behind all other observers if the Trainer has a logger. Nothing is logged inside a step, and a
    logger that fails costs one line on standard error. `lmbench fit` gives W&B the same names without `lmbench/`.

    Logged for each of the last 10 000 steps of warm-up and window, at its global step:

    - `lmbench/time/<phase>_ms`, `lmbench/host/<phase>_ms`: device and host time of the phase, or of the step.
    - `lmbench/lag/<phase>_ms`: how far the device is behind the host at the phase's end.
    - `lmbench/throughput/tokens_per_s`: tokens per second over all ranks.
    - `lmbench/train/<field>`: every other number and flag of the StepRecord, such as `loss` (nats).

    Logged once, at the last of these steps:

    - `lmbench/summary/<name>`: means of the phases and, with a RunRecorder, throughput, memory and the other names of
      `lmbench/report/logged.csv`, which end in their unit.
    """

    def __init__(self, session: MeasurementSession, trainer: Trainer) -> None:
        self._session, self.trainer = session, trainer
        # Not zero in a run that resumes from a checkpoint.
        self._first_global_step = trainer.global_step
        self._has_logged = False

    def run_ended(self, exception: BaseException | None) -> None:
        records = self.session.records
        # An exception after the end of a run ends it once more.
        if not self.trainer.is_global_zero or not records or self._has_logged:
            return
        self._has_logged = True
        run = self.session.run
        if run.outcome == RUNNING:
            # No RunRecorder has summarized the steps.
            run = RunRecord(SCHEMA_VERSION, RUNNING, phases=summarize_steps(records))
        rows = [(PREFIX, of_step(record, run), record.step or 0) for record in records]
        rows.append((f"{PREFIX}summary/", of_run(run), records[-1].step or 0))
        for logger in self.trainer.loggers:
            try:
                for prefix, values, step in rows:
                    metrics = {f"{prefix}{name}": value for name, value in values.items()}
                    logger.log_metrics(metrics, self._first_global_step + step)
            # The measurement is complete, so no error of a logger may end the run.
            except Exception as fault:
                reason = " ".join(f"{type(fault).__name__}: {fault}".split())
                tell(f"{type(logger).__name__} did not take what was measured: {reason}")
