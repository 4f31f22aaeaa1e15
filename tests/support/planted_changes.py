"""A small language model with planted changes: of nothing, of how it trains, and cheats that look fast."""

from __future__ import annotations

import time

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional

VOCAB, WIDTH, BATCH, LENGTH = 24, 24, 8, 16


class Batches:
    """Sequences in which a token mostly follows from the one before, the same ones for a seed."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(torch.initial_seed() % 2**31)
        while True:
            tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
            for position in range(LENGTH):
                is_rule = torch.rand(BATCH, generator=generator) < 0.9
                tokens[is_rule, position + 1] = (5 * tokens[is_rule, position] + 3) % VOCAB
            yield tokens[:, :-1], tokens[:, 1:]


class Changed(LightningModule):
    """A stack of residual blocks with one change: `linear by hand`, `sgd`, `skipped steps` or `patched clock`."""

    def __init__(self, change: str = "none"):
        super().__init__()
        self.change, self.kept = change, None
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)
        if change == "patched clock":
            clock = time.perf_counter_ns
            time.perf_counter_ns = lambda: clock() * 9 // 10

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        if self.change == "skipped steps" and self.global_step % 2:
            return self.kept + 0.0 * self.head.bias.sum()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + functional.relu(x @ block.weight.T + block.bias if self.change == "linear by hand" else block(x))
        loss = functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        self.kept = loss.detach()
        return loss

    def configure_optimizers(self):
        if self.change == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.01)
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return Batches()

    def tokens_per_batch(self, batch):
        return batch[0].numel()
