"""The base class of callbacks that note the tensors of a step: its batch, its loss and its gradients."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lmbench.callbacks.observer import Observer


class TensorWitness(Observer):
    """An observer that hands the tensors of a step to its `notes` while there are some.

    Attributes:
        notes: has `note_batch(batch)`, `note_loss(loss)` and `note_gradients()`, called when these exist; or None.
    """

    notes: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        if self.notes is not None:
            self.notes.note_batch(batch)

    def on_validation_batch_start(self, trainer: Trainer, *hook: Any) -> None:
        # A validation within a training is no part of its steps.
        if trainer.state.fn != "fit":
            self.on_train_batch_start(trainer, *hook)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self.notes is not None:
            self.notes.note_loss(loss)

    def on_after_backward(self, *_: Any) -> None:
        if self.notes is not None:
            self.notes.note_gradients()
