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
    is_changed = mode in ("forward", "forward_backward") or (mode == "train_step" and zero_grad == "after_step")
    if is_changed and not module.automatic_optimization:
        given, allowed = ("mode", mode), "train_step"
        if mode == "train_step":
            given, allowed = ("zero_grad", zero_grad), "native"
        raise UsageError(
            f"measure.{given[0]} is {given[1]}, but {type(module).__name__} optimizes by hand "
            f"(automatic_optimization is False); allowed: {allowed}"
        )
    if mode == "forward":
        module.backward = _no_backward  # type: ignore[method-assign]
    if mode in ("forward", "forward_backward"):
        module.optimizer_step = _closure_only  # type: ignore[method-assign,assignment]
    if zero_grad == "after_step" and mode in ("forward_backward", "train_step"):
        _zero_after_step(module)


def _no_backward(loss: Any, *args: Any, **kwargs: Any) -> None:
    """Mode `forward` has no backward."""


def _closure_only(
    epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any] | None = None
) -> None:
    """Forward and backward are in the closure; the update is left out."""
    if optimizer_closure is not None:
        optimizer_closure()


def _zero_after_step(module: LightningModule) -> None:
    step, zero = module.optimizer_step, module.optimizer_zero_grad

    def optimizer_step(
        epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        step(epoch, batch_idx, optimizer, optimizer_closure)
        # Under the name Lightning gives this action, so that every profiler sees it as what it is.
        with module.trainer.profiler.profile(  # type: ignore[attr-defined]
            f"[LightningModule]{type(module).__name__}.optimizer_zero_grad"
        ):
            zero(epoch, batch_idx, optimizer)

    module.optimizer_step = optimizer_step  # type: ignore[method-assign,assignment]
    module.optimizer_zero_grad = _zeroed_already  # type: ignore[method-assign]


def _zeroed_already(epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
    """The gradients were freed when the last step ended."""
