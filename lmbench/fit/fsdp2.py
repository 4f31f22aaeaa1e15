"""`--trainer.strategy fsdp2`: fully sharded data parallel (FSDP2), block by block, under Lightning's own strategy."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lmbench.instruments.compiling import CompileOptions, compile_targets
from lmbench.precision import find_precision

NAME = "fsdp2"


class Fsdp2Strategy(ModelParallelStrategy):
    """Shards each of the module's alike blocks, then the rest, over all devices.

    A module that shards itself in its `configure_model` is left as it is. With bf16-mixed the blocks compute on
    gathered bf16 parameters, and gradients are reduced in float32.

    Args:
        reshard_after_forward: free gathered parameters after the forward, and gather them again in the backward.
    """

    def __init__(self, reshard_after_forward: bool = True, **options: Any) -> None:
        super().__init__(tensor_parallel_size=1, **options)
        self._reshards = reshard_after_forward

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_processes * self.num_nodes
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        module = self.model
        assert isinstance(module, LightningModule)
        if not any(isinstance(part, FSDPModule) for part in module.modules()):
            self._shard(module, str(trainer.precision))
        super().setup(trainer)

    def _shard(self, module: LightningModule, precision: str) -> None:
        meaning = find_precision(precision)
        policy = MixedPrecisionPolicy()
        if meaning is not None and meaning.is_mixed:
            policy = MixedPrecisionPolicy(meaning.compute_dtype(), torch.float32)
        options: dict[str, Any] = {"mesh": self.device_mesh["data_parallel"], "mp_policy": policy}
        # On the device: a mesh of GPUs shards no tensor of the host's.
        module.to(self.root_device)
        blocks = [part for part in compile_targets(module, CompileOptions(regional=True)) if part is not module]
        for block in blocks:
            fully_shard(block, reshard_after_forward=self._reshards, **options)
        fully_shard(_root(module), **options)


def _root(module: LightningModule) -> nn.Module:
    """What holds all parameters: a LightningModule itself is called by `training_step`, around FSDP2's hooks."""
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    return children[0] if len(children) == 1 else module


StrategyRegistry.register(NAME, Fsdp2Strategy, description="FSDP2, block by block")
