"""Records the gradient norm of every step without making the host wait for the device."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from lmbench.callbacks.observer import Observer
from lmbench.instruments.training import loss_scaler, parameters_of, total_norm, unscales_itself


class GradientNorm(Observer):
    """Records the 2-norm of all gradients at every optimizer step, before clipping and without the fp16 loss scale.

    The norm stays on the device until the device has passed the step, and is then read together with the loss. Its
    kernels belong to the step: their time counts as phase `clip`, because clipping by norm launches the same kernels.

    Recorded in the step records of the run's PhaseTimer:

    - `gradient_norm`, without a unit; null where no optimizer stepped.
    """

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        if not gradients:
            return
        session = self.session
        session.track.enter("clip")
        norm = total_norm(gradients)
        scaler = loss_scaler(trainer)
        if scaler is not None and scaler._scale is not None and unscales_itself(optimizer):
            norm = norm / scaler._scale
        session.track.leave()
        session.log_scalar("gradient_norm", norm, source=optimizer)
