"""Did it train? Looked at on an unmeasured step."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from lmbench.callbacks.session import Observer
from lmbench.measure.schedule import ProbeKind
from lmbench.measure.training import MovementSample, gradient_facts, sample_parameters


class TrainingCheck(Observer):
    """Lists parameters without gradients before the optimizer's step, and those that did not move after it.

    Leaves `probe.training.*`: `parameters` (trainable tensors), `missing_gradients`, `zero_gradients`,
    `nonfinite_gradients` and `unmoved_parameters` (names; the last is null where no optimizer ran), `gradient_norm`.
    """

    def __init__(self) -> None:
        self._sample: MovementSample | None = None
        self._is_on = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._module = pl_module

    def probe_begins(self, kind: ProbeKind) -> None:
        self._is_on = kind is ProbeKind.TRAINING and self._module.training

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Without an optimizer's step (mode forward_backward) this is the last moment at which gradients exist.
        if self._is_on:
            self._leave_gradients(pl_module)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self._is_on:
            self._leave_gradients(pl_module)
            self._sample = sample_parameters(pl_module)

    def _leave_gradients(self, module: LightningModule) -> None:
        training = self.session.facts.setdefault("probe", {}).setdefault("training", {})
        training.update(gradient_facts(module))
        training.setdefault("unmoved_parameters", None)

    def probe_ended(self, kind: ProbeKind) -> None:
        if self._is_on and self._sample is not None:
            self.session.facts["probe"]["training"]["unmoved_parameters"] = self._sample.unmoved()
        self._is_on, self._sample = False, None
