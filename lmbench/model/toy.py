"""The toy whose dtypes were published: a linear layer, ReLU, LayerNorm and another linear layer."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

_BATCHES = 8


class Toy(LightningModule):
    """Classifies random vectors, with ten hidden units and no biases.

    That is the model of the exercise that the write-ups in `reference/precision_dtypes.csv` answer (Stanford's CS336,
    assignment 2: which dtypes has it under autocast?); it leaves open how many features there are. One of them has the
    ReLU in front of the LayerNorm, as here.

    Args:
        in_features: numbers in a vector.
        out_features: classes.
        batch_size: vectors in a batch.
        loss_factor: what the loss is multiplied by; 1e8 lets float16 gradients overflow at every step.
    """

    def __init__(
        self, in_features: int = 20, out_features: int = 5, batch_size: int = 8, loss_factor: float = 1.0
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, 10, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, out_features, bias=False)
        self.batch_size, self.loss_factor = batch_size, loss_factor

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits, ``batch classes``."""
        logits: Tensor = self.fc2(self.ln(self.relu(self.fc1(inputs))))
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, classes = batch
        return self.loss_factor * functional.cross_entropy(self(inputs), classes)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        count = _BATCHES * self.batch_size
        inputs = torch.randn(count, self.fc1.in_features)
        classes = torch.randint(self.fc2.out_features, (count,))
        return DataLoader(TensorDataset(inputs, classes), self.batch_size)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self.train_dataloader()
