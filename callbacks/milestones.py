"""Notes when a run reached what, so that a sweep can tell a cell's cost from its steps."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer

from lmbench.callbacks.observer import Observer
from lmbench.instruments.milestones import reach
from lmbench.instruments.schedule import ProbeKind
from lmbench.records.vocabulary import Stage


class Milestones(Observer):
    """Comes after all other observers, so that `ready` is when the first batch is fetched."""

    def __init__(self) -> None:
        self._has_stepped = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reach("built")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reach("built")

    def run_started(self) -> None:
        reach("ready")

    def step_ended(self, stage: Stage, kind: ProbeKind | None) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            reach("first_step")

    def window_opened(self) -> None:
        reach("window_opened")

    def window_closed(self) -> None:
        reach("window_closed")

    def run_closing(self, exception: BaseException | None) -> None:
        reach("stepped")
