"""Notices gradients and updates that Lightning did not announce."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lmbench.instruments.phases import PhaseTrack


class BypassWatch:
    """Marks `backward` or `optimizer` as unseen where manual optimization also goes around Lightning.

    A `training_step` may call `loss.backward()` beside `self.manual_backward(loss)`, or PyTorch's own optimizer beside
    Lightning's: then a part of the phase has no borders, and the rest would be a wrong time under its name. PyTorch's
    hooks tell: `Tensor.register_post_accumulate_grad_hook`, `Optimizer.register_step_post_hook`. They cost the host
    a call for every parameter, so `remove` them before the window.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Any], track: PhaseTrack) -> None:
        self._track = track
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        own = [optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer)]
        self._handles = [
            *(parameter.register_post_accumulate_grad_hook(self._gradient) for parameter in trainable),
            *(optimizer.register_step_post_hook(self._update) for optimizer in own),
        ]

    def _gradient(self, parameter: Any) -> None:
        self._expect("backward")

    def _update(self, *_: Any) -> None:
        self._expect("optimizer")

    def _expect(self, phase: str) -> None:
        if self._track.innermost != phase:
            self._track.hide(phase)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
