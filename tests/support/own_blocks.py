"""A LightningModule of a user's with blocks of its own: a pre-norm encoder with learned positions and tied weights."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self, width, heads, dropout, factor=4):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, factor * width), nn.Linear(factor * width, width)

    def forward(self, x):
        parts = self.attend(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + functional.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + self.down(functional.gelu(self.up(self.second(x))))


class OwnBlocks(LightningModule):
    """`checkpoints` recomputes the blocks in the module's own way."""

    def __init__(
        self,
        width: int = 64,
        layers: int = 6,
        heads: int = 4,
        vocab_size: int = 256,
        dropout: float = 0.1,
        checkpoints: bool = False,
    ):
        super().__init__()
        self.checkpoints = checkpoints
        self.embed, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(4096, width)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
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


class Staged(OwnBlocks):
    """The blocks are a member of a list, which `--trainer.compile.regional` compiles as one."""

    def __init__(self, width: int = 64):
        super().__init__(width)
        self.layers = nn.ModuleList([nn.Sequential(*self.layers), nn.Sequential(nn.LayerNorm(width))])


class Mixed(OwnBlocks):
    """The first block, and every third one, is narrower than the others."""

    def __init__(self, width: int = 64):
        super().__init__(width)
        self.layers = nn.ModuleList(Layer(width, 4, 0.1, factor=4 if index % 3 else 1) for index in range(6))


class TwoBackwards(OwnBlocks):
    """An embedding is updated before the blocks are called."""

    def __init__(self, width: int = 64, vocab_size: int = 256):
        super().__init__(width, vocab_size=vocab_size)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for loss in (
            lambda: self.embed.weight.square().mean(),
            lambda: super(TwoBackwards, self).training_step(batch, 0),
        ):
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
