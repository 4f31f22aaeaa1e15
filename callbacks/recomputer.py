"""Lets the backward pass compute blocks again."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lmbench.instruments.recomputing import RecomputeOptions, recompute_in_place


class Recomputer(Callback):
    """Lets the backward pass compute a module's blocks again, in place of saving what their operators made.

    Args:
        options: which blocks, and what they keep.

    Raises:
        UsageError: the module has no list of blocks, or does more between blocks than a group allows.
    """

    def __init__(self, options: RecomputeOptions) -> None:
        self.options = options
        self._undo = ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._undo = recompute_in_place(pl_module, self.options)

    def teardown(self, *_: Any, **__: Any) -> None:
        self._undo.close()

    # Lightning leaves out `teardown` after an exception.
    on_exception = teardown
