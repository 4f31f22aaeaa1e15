"""The base class of measuring callbacks."""

from __future__ import annotations

from contextlib import ExitStack

from lightning.pytorch import LightningModule, Trainer

from lmbench.callbacks.events import Events
from lmbench.callbacks.session import RUNS, MeasurementSession
from lmbench.device import Device, device_of
from lmbench.records.run import RunRecord


class Observer(Events):
    """A measuring callback, which the run's `MeasurementSession` notifies of its `Events`.

    In a Trainer without a session the first observer attaches one that only watches: 5 warm-up steps, then a window
    until training ends. It takes no probe steps, stops nothing, and is removed when the run is over. Every further
    `fit` or `validate` is a new run; facts and records are those of the latest. `test` and `predict` are not measured.

    Attributes:
        run: record of the run, whose fields the observer fills in.
        device: the run's device.
    """

    trainer: Trainer
    module: LightningModule
    #: None before the setup of a run.
    session: MeasurementSession = None  # type: ignore[assignment]
    run: RunRecord
    device: Device

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage not in RUNS:
            return
        self.trainer, self.module, self.undo = trainer, pl_module, ExitStack()
        self.session = session = MeasurementSession.of(trainer)
        self.run, self.device = session.run, device_of(session.device)
        if self not in session.observers:
            session.observers.append(self)
        self.prepare()

    def prepare(self) -> None:
        """Begin a run that is set up, and forget the one before."""
