"""Lightning's mixed precision with two defects of 2.6 repaired."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType

REPAIRS = (
    "autocast keeps its cache of cast weights (Lightning 2.6 turns it off: issue #21611)",
    "clipping works with a fused optimizer where there is no loss scaler (Lightning 2.6 refuses: issue #21435)",
)


class RepairedMixedPrecision(MixedPrecision):
    """`MixedPrecision` with autocast's weight cache on, and clipping allowed for fused optimizers without a scaler."""

    def autocast_context_manager(self) -> torch.autocast:
        dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.half
        return torch.autocast(self.device, dtype=dtype)

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        # Without a scaler a fused optimizer unscales nothing, and Lightning's refusal has no reason.
        owner = Precision if self.scaler is None else MixedPrecision
        owner.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)
