"""The hooks that Lightning calls inside a training step, and not calling those that nobody wrote."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class LeanCallback(Callback):
    """A callback whose class leaves a step hook that it does not define at None, which Lightning skips.

    Otherwise Lightning calls the empty hook of every callback through its profiler, 54 times a step for lmbench's nine.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for hook in STEP_HOOKS:
            if getattr(cls, hook) is getattr(Callback, hook):
                setattr(cls, hook, None)
