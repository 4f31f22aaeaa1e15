"""Did it train? Looked at on unmeasured steps: the last one of the warm-up, and a probe step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

from lmbench.callbacks.observer import Observer
from lmbench.instruments.training import (
    gradient_facts,
    loss_scaler,
    norms,
    unscales_itself,
)
from lmbench.instruments.window import ProbeKind
from lmbench.records.vocabulary import Stage


class TrainingCheck(Observer):
    """Lists parameters without gradients before the optimizer's step, and those that did not move after it.

    With several optimizers each one's parameters are looked at before its own step. It takes probe steps, which a
    Trainer of your own has only with `MeasurementSession(Schedule(steps=..., probe_steps=...))`.

    Leaves `warmup.gradient_norm`, of the last warm-up step: the same step in all runs with that warm-up, however long
    their windows. And `probe.training.*`: `parameters` (trainable tensors), `missing_gradients`, `zero_gradients`,
    `nonfinite_gradients` and `unmoved_parameters` (names; the last is null where no optimizer ran), `gradient_norm`,
    `is_skipped` (the fp16 scaler skipped this step).
    """

    def prepare(self) -> None:
        #: Norms of parameters before their optimizer stepped.
        self._before = dict[str, float]()
        self._is_on = False

    def probe_begins(self, kind: ProbeKind) -> None:
        self._is_on = kind is ProbeKind.TRAINING and self.module.training
        if self._is_on:
            # As it is between steps: inside one, `toggle_optimizer` makes parameters look frozen.
            self._trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
            self._norms: dict[str, float] = {}
            self._stepped: set[str] = set()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Without an optimizer's step (mode forward_backward) this is the last moment at which gradients exist.
        if self._is_on:
            self._look([name for name in self._trainable if name not in self._stepped], self._loss_scale())
        else:
            self._note_norm(self._loss_scale)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._is_on:
            self._note_norm(self._unscaled_by)
            return
        # Parameters that no optimizer has are compared too: that they do not move is what there is to find.
        others = {id(p) for o in trainer.optimizers for p in _parameters(o)} - {id(p) for p in _parameters(optimizer)}
        left = {name: p for name, p in self._trainable.items() if id(p) not in others and name not in self._stepped}
        self._look(left, self._unscaled_by())
        self._stepped |= left.keys()
        if not self._before:
            self._scale = self._loss_scale()
        weights = {name: p.detach() for name, p in left.items() if p.grad is not None}
        self._before |= norms(weights, torch.float64)

    def _loss_scale(self) -> float:
        scaler = loss_scaler(self.trainer)
        return scaler.get_scale() if scaler else 1.0

    def _unscaled_by(self) -> float:
        """What the gradients are still multiplied by: a fused optimizer unscales them only inside its step."""
        return self._loss_scale() if any(map(unscales_itself, self.trainer.optimizers)) else 1.0

    def _note_norm(self, scale: Callable[[], float]) -> None:
        """Note the norm in the warm-up's last step; the last call stands: of all micro-batches, unscaled."""
        session = self.session
        is_last = session.stage is Stage.WARMUP and session.steps_done == session.schedule.warmup_steps - 1
        if not is_last or session.only_watches:
            return
        gradients = norms({name: p.grad for name, p in self.module.named_parameters()})
        # Mode `forward` has no backward, whatever Lightning's hook is called.
        if gradients:
            session.run.warmup.gradient_norm = math.hypot(*gradients.values()) / scale()

    def _look(self, names: Iterable[str], scale: float) -> None:
        self._norms |= norms({name: self._trainable[name].grad for name in names})
        self.session.run.probe.training = gradient_facts(self._trainable, self._norms, scale)

    def probe_ended(self, kind: ProbeKind) -> None:
        training = self.session.run.probe.training
        if self._is_on and self._before and training is not None:
            after = norms({name: self._trainable[name].detach() for name in self._before}, torch.float64)
            training.unmoved_parameters = [name for name, norm in self._before.items() if after[name] == norm]
            # The scaler lowers its scale exactly when it found an infinity and skipped the update.
            training.is_skipped = self._loss_scale() < self._scale
        self._is_on = False
        self._before.clear()


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
