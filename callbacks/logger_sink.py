"""Writes what was measured to the Trainer's loggers."""

from __future__ import annotations

from lmbench.callbacks.observer import Observer
from lmbench.errors import error_line, tell
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.summary import summarize_steps
from lmbench.records.vocabulary import RUNNING
from lmbench.report.logged import of_run, of_step

#: Begins every logged name, so that none is equal to one of the user's.
PREFIX = "lmbench/"


class LoggerSink(Observer):
    """Logs the measured steps and their summary to every logger of the Trainer when the run is over.

    The PhaseTimer adds it behind all other observers if the Trainer has a logger. Nothing is logged inside a step, and
    a logger that fails costs one line on standard error. `lmbench fit` gives W&B the same names without `lmbench/`.

    Logged for each of the last 10 000 steps of warm-up and window, at its global step:

    - `lmbench/time/<phase>_ms`, `lmbench/host/<phase>_ms`: device and host time of the phase, or of the step.
    - `lmbench/lag/<phase>_ms`: how far the device is behind the host at the phase's end.
    - `lmbench/throughput/tokens_per_s`: tokens per second over all ranks.
    - `lmbench/train/<field>`: every other number and flag of the StepRecord, such as `loss` (nats).

    Logged once, at the last of these steps:

    - `lmbench/summary/<name>`: means of the phases and, with a RunRecorder, throughput, memory and the other names of
      `lmbench/report/logged.csv`, which end in their unit.
    """

    def prepare(self) -> None:
        # Not zero in a run that resumes from a checkpoint.
        self._first_global_step = self.trainer.global_step
        self._has_logged = False

    def run_ended(self, exception: BaseException | None) -> None:
        records, run = self.session.records, self.run
        # An exception after the end of a run ends it once more.
        if not self.trainer.is_global_zero or not records or self._has_logged:
            return
        self._has_logged = True
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
                tell(f"{type(logger).__name__} did not take what was measured: {error_line(fault)}")
