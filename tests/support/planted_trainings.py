"""Language models that train correctly in float32 but have a fault in bf16-mixed."""

from __future__ import annotations

from typing import Any

from lmbench.model.language_model import LanguageModel

NAN_STEP = 30


class Planted(LanguageModel):
    """A model with one `fault` in bf16-mixed: `scale` (gradients three times as long), `nan` (the loss is nan from
    `NAN_STEP` on), `still` (the learning rate is 0) or `none`."""

    def __init__(self, fault: str = "none", **settings: Any):
        super().__init__(**settings)
        self.fault = fault

    def active(self, fault):
        return self.fault == fault and str(self.trainer.precision) == "bf16-mixed"

    def on_fit_start(self):
        if self.active("scale"):
            for parameter in self.parameters():
                parameter.register_hook(lambda gradient: 3 * gradient)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.active("nan") and batch_idx >= NAN_STEP else loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        for group in optimizer.param_groups:
            group["lr"] *= 0 if self.active("still") else 1
        return optimizer
