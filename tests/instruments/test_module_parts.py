"""Which lists of a module are its blocks, whether these are alike, and layers that are no modules."""

from __future__ import annotations

import torch
from fit_process import measure_here
from lightning.pytorch import LightningModule
from refusals import usage_error
from tables import cases
from torch import nn

from lmbench.instruments.module_parts import AlikeBlocks, compile_targets
from lmbench.instruments.recomputing import RecomputeOptions, recompute_in_place


class ExpertLayer(nn.Sequential):
    """A subclass, since blocks need only have a class in common."""


class Layers(LightningModule):
    """Six layers, of which those whose number `has_experts` takes have a list of eight experts."""

    def __init__(self, has_experts):
        super().__init__()
        self.layers = nn.ModuleList(
            (ExpertLayer if has_experts(n) else nn.Sequential)(
                nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(8)) if has_experts(n) else nn.Tanh()
            )
            for n in range(6)
        )


@cases("has_experts | kinds | count", (lambda n: True, [0] * 6, 6), (lambda n: n % 2, [0, 1] * 3, None))
def test_blocks_are_layers_and_not_their_experts_and_only_alike_ones_are_cut(has_experts, kinds, count):
    module = Layers(has_experts)
    blocks = AlikeBlocks(module, 3)
    assert (blocks.lists, blocks.kinds, blocks.count) == ([module.layers], kinds, count)
    assert len(module.layers) == (3 if count else 6)


class Pairs(LightningModule):
    """Six layers that are no modules of their own, but lists of a norm, a product and nothing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(8), nn.Linear(8, 8), None]) for _ in range(6))

    def forward(self, x):
        for norm, product, _ in self.layers:
            x = x + product(norm(x))
        return x

    def training_step(self, batch):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_layers_that_are_lists_are_no_blocks_and_their_members_are_marked():
    run = measure_here(Pairs(), torch.ones(4, 8), probe_steps=1)
    assert (run.outcome, run.record.probe.marked_modules) == ("ok", 12)
    assert AlikeBlocks(Pairs(), 3).lists == []
    with usage_error("needs a list of blocks of one class, and Pairs has none"):
        recompute_in_place(Pairs(), RecomputeOptions())
    pairs = Pairs()
    assert compile_targets(pairs, is_regional=True) == [pairs]
