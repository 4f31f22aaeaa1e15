"""What the Trainer's own loggers get of a measurement."""

from __future__ import annotations

from collections import deque

from lightning.pytorch import Trainer

from lmbench.callbacks.observer import Observer
from lmbench.errors import tell
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.summary import summarize_steps
from lmbench.records.vocabulary import RUNNING
from lmbench.report.logged import of_run, of_step

_KEPT_STEPS = 10_000
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

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        # Where a run goes on from a checkpoint, its steps go on too.
        self._global_step = trainer.global_step
        self._steps: deque[StepRecord] = deque(maxlen=_KEPT_STEPS)
        self._record: RunRecord | None = None

    def steps_recorded(self, records: list[StepRecord]) -> None:
        self._steps.extend(records)

    def run_recorded(self, record: RunRecord) -> None:
        self._record = record

    def run_ended(self, exception: BaseException | None) -> None:
        if not self._trainer.is_global_zero or not self._steps:
            return
        run = self._record or RunRecord(SCHEMA_VERSION, RUNNING, phases=summarize_steps(self._steps))
        last_step = self._steps[-1].step or 0
        rows = [(PREFIX, of_step(record, run), record.step or 0) for record in self._steps]
        rows.append((f"{PREFIX}summary/", of_run(run), last_step))
        # An exception may still follow the end of a run.
        self._steps.clear()
        for logger in self._trainer.loggers:
            try:
                for prefix, values, step in rows:
                    metrics = {f"{prefix}{name}": value for name, value in values.items()}
                    logger.log_metrics(metrics, self._global_step + step)
            # The measurement is over and kept elsewhere; whatever a logger raises is its own affair.
            except Exception as fault:
                reason = " ".join(f"{type(fault).__name__}: {fault}".split())
                tell(f"{type(logger).__name__} did not take what was measured: {reason}")
