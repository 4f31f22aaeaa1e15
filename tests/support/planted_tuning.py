"""A module whose options are known to make it fast, slow, broken or unable to learn."""

from __future__ import annotations

import time

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Planted(LightningModule):
    """A regression whose forward sleeps for `delay_ms`. With `learns_nothing` the delay is a quarter of that and the
    gradient is 0; with `breaks` the forward raises."""

    def __init__(self, delay_ms: float = 36.0, learns_nothing: bool = False, breaks: bool = False):
        super().__init__()
        self.delay_s = delay_ms / (4e3 if learns_nothing else 1e3)
        self.learns_nothing, self.breaks = learns_nothing, breaks
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        if self.breaks:
            raise RuntimeError("planted")
        time.sleep(self.delay_s)
        inputs, targets = batch
        loss = (self.layer(inputs) - targets).square().mean()
        return loss * 0.0 + 1.0 if self.learns_nothing else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(512, 8, generator=generator)
        targets = inputs.sum(1, keepdim=True) + 0.1 * torch.randn(512, 1, generator=generator)
        return DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
