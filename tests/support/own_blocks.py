"""A LightningModule of a user's with blocks of its own: a pre-norm encoder with learned positions and tied weights."""

from __future__ import annotations

from functools import partial

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class OwnBlocks(LightningModule):
    """`checkpoints` recomputes the blocks in the module's own way."""

    def __init__(
        self, width: int = 64, layers: int = 6, heads: int = 4, vocab_size: int = 256, checkpoints: bool = False
    ):
        super().__init__()
        self.checkpoints = checkpoints
        self.embed, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(4096, width)
        block = partial(nn.TransformerEncoderLayer, width, heads, 4 * width, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        logits = self.norm(x) @ self.embed.weight.T
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class TwoBackwards(OwnBlocks):
    """Updates its weights by hand, twice in a step."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()
