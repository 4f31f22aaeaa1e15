"""Plants what no option of a run can change, so that a prediction of `lmbench kernels --what_if` is checked."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class Counterfactual(Callback):
    """Plants gradients that are not averaged, or a rank that is late, for the study `what_if`.

    Args:
        synchronizes: whether DistributedDataParallel averages the gradients of the ranks.
        late_s: seconds that the last rank sleeps before each batch.
    """

    def __init__(self, synchronizes: bool = True, late_s: float = 0.0) -> None:
        self.synchronizes, self.late_s = synchronizes, late_s

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.synchronizes:
            model: Any = trainer.strategy.model
            model.require_backward_grad_sync = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.late_s and trainer.global_rank == trainer.world_size - 1:
            time.sleep(self.late_s)
