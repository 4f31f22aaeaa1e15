"""Which lists of a module are its blocks, and whether these are alike."""

from __future__ import annotations

import pytest
from lightning.pytorch import LightningModule
from torch import nn

from lmbench.instruments.alike_blocks import AlikeBlocks


class Layers(LightningModule):
    """Six layers, of which those whose number `has_experts` takes have a list of eight experts."""

    def __init__(self, has_experts):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(8)) if has_experts(n) else nn.Tanh()
            )
            for n in range(6)
        )


@pytest.mark.parametrize(
    ("has_experts", "kinds", "count"), [(lambda n: True, [0] * 6, 6), (lambda n: n % 2, [0, 1] * 3, None)]
)
def test_blocks_are_layers_and_not_their_experts_and_only_alike_ones_are_cut(has_experts, kinds, count):
    module = Layers(has_experts)
    blocks = AlikeBlocks(module, 3)
    assert (blocks.lists, blocks.kinds, blocks.count) == ([module.layers], kinds, count)
    assert len(module.layers) == (3 if count else 6)
