"""Batches of tokens: how they are drawn, and the iterables that a Trainer takes them from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from lmbench.data.token_cache import TokenIds


class TokenBatch(NamedTuple):
    """Token ids and, one position later, the ids to predict: int64, ``batch seq`` each."""

    tokens: Tensor
    targets: Tensor


def on_device(batch: TokenBatch, device: torch.device) -> TokenBatch:
    """The batch on a device.

    No method ``to``: Lightning would call that, and block, instead of copying each tensor without blocking.
    """
    return TokenBatch(batch.tokens.to(device), batch.targets.to(device))


class Source(Protocol):
    """Where windows of ``batch seq+1`` token ids (int64) are drawn from, all by the generator given."""

    def windows(self, rng: np.random.Generator, batch_size: int, context_length: int) -> npt.NDArray[np.int64]: ...


@dataclass(frozen=True)
class RandomSource:
    """Ids drawn uniformly from the vocabulary."""

    vocab_size: int

    def windows(self, rng: np.random.Generator, batch_size: int, context_length: int) -> npt.NDArray[np.int64]:
        return rng.integers(self.vocab_size, size=(batch_size, context_length + 1), dtype=np.int64)


@dataclass(frozen=True)
class TextSource:
    """Windows that start anywhere in a text."""

    ids: TokenIds

    def windows(self, rng: np.random.Generator, batch_size: int, context_length: int) -> npt.NDArray[np.int64]:
        starts = rng.integers(self.ids.size - context_length, size=batch_size)
        return np.stack([self.ids[start : start + context_length + 1] for start in starts]).astype(np.int64)


@dataclass(frozen=True)
class Drawing:
    """A stream of batches from a source; the seed's parts tell run, rank and split apart."""

    source: Source
    batch_size: int
    context_length: int
    seed: tuple[int, ...]

    def batches(self, worker: int = 0) -> Iterator[TokenBatch]:
        """Batches without end, others for every loader process."""
        rng = np.random.default_rng((*self.seed, worker))
        while True:
            windows = torch.from_numpy(self.source.windows(rng, self.batch_size, self.context_length))
            yield TokenBatch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())

    def first(self, count: int) -> list[TokenBatch]:
        """The first batches of the stream."""
        return list(itertools.islice(self.batches(), count))


class DrawnDataset(IterableDataset[TokenBatch]):
    """For a DataLoader: batches drawn as they are asked for."""

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing

    def __iter__(self) -> Iterator[TokenBatch]:
        return self.drawing.batches(_worker())


class PrebuiltDataset(IterableDataset[TokenBatch]):
    """Batches that exist, in turn and without end; loader processes start at different ones."""

    def __init__(self, batches: Sequence[TokenBatch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[TokenBatch]:
        return itertools.islice(itertools.cycle(self.batches), _worker() % len(self.batches), None)


def _worker() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id
