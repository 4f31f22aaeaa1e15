"""A toy model that shows dtypes under autocast: a linear layer, ReLU, LayerNorm and another linear layer."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

_FEATURES, _CLASSES, _BATCH_SIZE, _BATCHES = 20, 5, 8, 8


class Toy(LightningModule):
    """Classifies random vectors, with ten hidden units and no biases.

    It is the model of an exercise about dtypes under autocast, of Stanford's CS336, assignment 2. The exercise leaves
    the number of features open.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(_FEATURES, 10, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, _CLASSES, bias=False)

    def forward(self, inputs: Tensor) -> Any:
        """Logits, ``batch classes``."""
        return self.fc2(self.ln(self.relu(self.fc1(inputs))))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, classes = batch
        return functional.cross_entropy(self(inputs), classes)

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        count = _BATCHES * _BATCH_SIZE
        vectors = TensorDataset(torch.randn(count, _FEATURES), torch.randint(_CLASSES, (count,)))
        return DataLoader(vectors, _BATCH_SIZE)

    val_dataloader = train_dataloader
