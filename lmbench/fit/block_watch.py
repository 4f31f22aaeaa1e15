"""Watches the blocks of a fake step: where each begins and ends, the FLOPs, and what moves to the host."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lmbench.callbacks import Recomputer
from lmbench.instruments.alike_blocks import AlikeBlocks
from lmbench.instruments.phases import PhaseTrack
from lmbench.instruments.recomputing import RecomputeOptions, first_of
from lmbench.memory.fake_gpu import Tracker
from lmbench.memory.plan import BlockBorders
from lmbench.memory.predictor import Allocation
from lmbench.records.vocabulary import Values

_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Counter(TorchDispatchMode):
    """Counts the FLOPs of matrix products and of attention."""

    flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        elif name == _ATTENTION:
            self.flops += sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
        elif name == f"{_ATTENTION}_backward":
            self.flops += sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4]))
        return out


class BlockWatch(Callback):
    """Notes the borders of alike blocks in the tracker's log, and counts FLOPs and bytes that are moved to the host.

    Args:
        recompute: the treatment of the blocks.
        model: changed arguments of the model.

    Attributes:
        borders: of the last step.
        allocations: all of the process.
        counter: counts the FLOPs of all steps.
        host_bytes: bytes that all steps move to the host.
    """

    def __init__(self, recompute: RecomputeOptions | None, model: Values) -> None:
        self.recompute, self.model = recompute, model
        self.borders, self.counter, self.host_bytes = BlockBorders(), Counter(), 0.0  # type: ignore[no-untyped-call]
        self.allocations: list[Allocation] = []
        self._tracker: Any = None
        self._blocks: Any = None

    def begin(self, trainer: Any, tracker: Tracker, track: PhaseTrack, blocks: AlikeBlocks) -> None:
        """Watch the steps of a trainer whose phases the tracker is told already, with this treatment of the blocks."""
        given = [callback for callback in trainer.callbacks if not isinstance(callback, Recomputer)]
        trainer.callbacks = [*given, *([Recomputer(self.recompute)] if self.recompute else []), self]
        self._tracker, self._blocks = tracker, blocks
        track.listeners.append(self._enter_phase)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for index, block in enumerate(self._blocks.lists[-1]):
            block.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True)
            block.register_forward_hook(partial(self._leave, index))

    def _enter_phase(self, phase: str) -> None:
        if phase == "backward":
            self.borders.backward_start = self._tracker.now
        elif phase in ("clip", "optimizer") and not self.borders.first_backward_end:
            # Without a gradient of the first block's input its backward ends with the phase.
            self.borders.first_backward_end = self._tracker.now

    def _enter(self, index: int, block: nn.Module, inputs: Any, named: Any) -> None:
        if self._tracker.phase != "forward":
            return
        self.borders.enter[index] = self._tracker.now
        hidden = first_of(inputs or tuple(named.values()))
        if index == 0:
            self.borders.first_backward_end = 0
            if hidden.requires_grad:
                hidden.register_hook(lambda _: setattr(self.borders, "first_backward_end", self._tracker.now))

    def _leave(self, index: int, block: nn.Module, inputs: Any, output: Any) -> None:
        if self._tracker.phase == "forward":
            self.borders.leave[index] = self._tracker.now
            first_of(output).register_hook(lambda _: self._begin_backward(index))

    def _begin_backward(self, index: int) -> None:
        self.borders.backward[index] = self._tracker.now
