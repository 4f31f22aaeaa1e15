"""Batches that are a shape and nothing else, for modules that hold their inputs themselves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule

from lmbench.errors import check_at_least


class BatchShape(NamedTuple):
    """Sequences, and positions in each."""

    batch_size: int
    context_length: int


class ShapeData(LightningDataModule):
    """Endless batches of one shape, without a tensor in them: nothing is drawn, moved or held.

    Args:
        batch_size: sequences in a batch.
        context_length: positions in a sequence.

    Raises:
        UsageError: one of them is below 1.
    """

    def __init__(self, *, batch_size: int = 4, context_length: int = 512) -> None:
        super().__init__()
        check_at_least(1, batch_size=batch_size, context_length=context_length)
        self.batch_size, self.context_length = batch_size, context_length
        self.shape = BatchShape(batch_size, context_length)

    def train_dataloader(self) -> Iterable[BatchShape]:
        return itertools.repeat(self.shape)

    val_dataloader = train_dataloader

    def tokens_per_batch(self, batch: BatchShape) -> int:
        """Positions in a batch."""
        return batch.batch_size * batch.context_length

    def describe(self) -> dict[str, Any]:
        """The shape, for the run's record."""
        return {"source": "random", **self.shape._asdict()}
