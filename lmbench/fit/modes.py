"""Make a LightningModule do only a part of the step, or zero its gradients after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from lmbench.errors import UsageError
from lmbench.fit.settings import Mode
from lmbench.model.attention_layer import AttentionLayer


def usual_mode(model: type) -> Mode:
    """What a module of this class is measured in unless a mode is set."""
    return "forward_backward" if issubclass(model, AttentionLayer) else "train_step"


def apply_mode(module: LightningModule, mode: str, zero_grad: str) -> None:
    """Change, on this instance only, what Lightning's loop does after the forward.

    `forward`: backward does nothing (the graph is built and dropped). `forward_backward`: the optimizer's step runs
    the closure alone, so gradients are computed and weights stay. With `zero_grad="after_step"` gradients are freed at
    the end of the step instead of between the next forward and backward. Other modes leave the module alone.

    Raises:
        UsageError: the module optimizes by hand, where nothing of this can be changed from outside, or has nothing to
            optimize.
    """
    if mode == "train_step" and isinstance(module, AttentionLayer):
        raise UsageError(
            "measure.mode is train_step, and attention by itself has nothing to optimize; allowed: forward, "
            "forward_backward"
        )
    setting, allowed = "", "train_step"
    if mode != "train_step":
        setting = f"mode is {mode}" if mode != "inference" else ""
    elif zero_grad == "after_step":
        setting, allowed = f"zero_grad is {zero_grad}", "native"
    if setting and not module.automatic_optimization:
        raise UsageError(
            f"measure.{setting}, but {type(module).__name__} optimizes by hand (automatic_optimization is False); "
            f"allowed: {allowed}"
        )
    if mode == "forward":
        module.backward = _nothing  # type: ignore[method-assign]
    if mode in ("forward", "forward_backward"):
        module.optimizer_step = _closure_only  # type: ignore[method-assign,assignment]
    if zero_grad == "after_step" and mode in ("forward_backward", "train_step"):
        _zero_after_step(module)


def _nothing(*_: Any, **__: Any) -> None:
    """What a mode leaves out."""


def _closure_only(epoch: int, batch_idx: int, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
    """Forward and backward are in the closure; the update is left out."""
    if closure is not None:
        closure()


def _zero_after_step(module: LightningModule) -> None:
    step, zero = module.optimizer_step, module.optimizer_zero_grad

    def optimizer_step(*arguments: Any) -> None:
        """`arguments` are epoch, index of the batch, optimizer and closure."""
        step(*arguments)
        # Under the name Lightning gives this action, so that every profiler sees it as what it is.
        with module.trainer.profiler.profile(  # type: ignore[attr-defined]
            f"[LightningModule]{type(module).__name__}.optimizer_zero_grad"
        ):
            zero(*arguments[:3])

    module.optimizer_step = optimizer_step  # type: ignore[method-assign,assignment]
    # The gradients were freed when the last step ended.
    module.optimizer_zero_grad = _nothing  # type: ignore[method-assign]
