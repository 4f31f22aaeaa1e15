"""What the Trainer's own loggers get of a measurement."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
from lightning.pytorch import Trainer

from lmbench.callbacks.observer import Observer
from lmbench.errors import tell
from lmbench.records.run import RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.summary import summarize_steps

_KEPT_STEPS = 10_000
# Of the record: what most people plot. A chart for each of its 300 numbers would drown a logger of theirs.
_PARTS = ("window", "throughput", "loss", "memory")
_OF_PHASES = ("mean_s", "std_s", "median_s", "share_fraction")


class LoggerSink(Observer):
    """Hands what was measured to every logger of the Trainer when the run is over, outside of every step.

    The session brings it, last of all observers, where the Trainer has a logger.

    Logs, for each of the last 10 000 steps of warm-up and window at its global step, `lmbench/<field>` for every number
    and flag of the step record (`lmbench/step_s`, `lmbench/forward_s`, `lmbench/loss`); then at the last of them
    `lmbench/summary/phases.<phase>.<field>` with mean, median, standard deviation and share of every phase and, where
    a RunRecorder closed a record, `lmbench/summary/<field>` for the numbers of its window, throughput, loss and memory.
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

    def run_ended(self) -> None:
        self._log()

    def run_failed(self, trainer: Trainer, exception: BaseException) -> None:
        self._log()

    def _log(self) -> None:
        if not self._trainer.is_global_zero or not self._steps:
            return
        rows = []
        for record in self._steps:
            step = msgspec.to_builtins(record)
            global_step = self._global_step + step.pop("step")
            del step["rank"]
            rows.append((_numbers("lmbench/", step), global_step))
        rows.append((_numbers("lmbench/summary/", self._summary()), global_step))
        # An exception may still follow the end of a run.
        self._steps.clear()
        for logger in self._trainer.loggers:
            try:
                for metrics, global_step in rows:
                    logger.log_metrics(metrics, global_step)
            # The measurement is over and kept elsewhere; whatever a logger raises is its own affair.
            except Exception as fault:
                told = " ".join(f"{type(fault).__name__}: {fault}".split())
                tell(f"{type(logger).__name__} did not take what was measured: {told}")

    def _summary(self) -> dict[str, Any]:
        record = {} if self._record is None else msgspec.to_builtins(self._record, enc_hook=str)
        phases = msgspec.to_builtins(summarize_steps(self._steps))
        return {
            "phases": {phase: {name: summary[name] for name in _OF_PHASES} for phase, summary in phases.items()},
            **{part: record[part] for part in _PARTS if record.get(part)},
        }


def _numbers(prefix: str, plain: dict[str, Any]) -> dict[str, float]:
    """Every number by its dotted name, and every flag as 0 or 1."""
    found: dict[str, float] = {}
    for name, value in plain.items():
        if isinstance(value, dict):
            found |= _numbers(f"{prefix}{name}.", value)
        elif isinstance(value, int | float):
            found[f"{prefix}{name}"] = int(value) if isinstance(value, bool) else value
    return found
