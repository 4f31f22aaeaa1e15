"""Logs the learning rate of every step that updates weights, where a scheduler changes it."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lmbench.callbacks.observer import Observer


class LearningRate(Observer):
    """Logs the learning rate of each optimizer's first group of parameters; attached where a scheduler changes it.

    Recorded as scalars of the step:

    - `learning_rate`: of the first optimizer; `learning_rate_1` of the second, and so on.
    """

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        index = trainer.optimizers.index(optimizer)
        rate = optimizer.param_groups[0]["lr"]
        # A scheduler changes a rate that is a tensor in place, before the step ends.
        rate = rate.clone() if isinstance(rate, Tensor) else rate
        self.session.log_scalar(f"learning_rate_{index}" if index else "learning_rate", rate)
