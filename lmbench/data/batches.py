"""Batches of tokens, and the endless iterables that a Trainer takes them from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from lmbench.data.corpus import TokenIds

Windows = npt.NDArray[np.int64]


class TokenBatch(NamedTuple):
    """Token ids and, one position later, the ids to predict: int64, ``batch seq`` each."""

    tokens: Tensor
    targets: Tensor


def random_windows(vocab_size: int, batch_size: int, context_length: int, rng: np.random.Generator) -> Windows:
    """Ids drawn uniformly from the vocabulary, ``batch seq+1``."""
    return rng.integers(vocab_size, size=(batch_size, context_length + 1), dtype=np.int64)


def text_windows(ids: TokenIds, batch_size: int, context_length: int, rng: np.random.Generator) -> Windows:
    """Windows of a text that start anywhere in it, ``batch seq+1``."""
    starts = rng.integers(ids.size - context_length, size=batch_size)
    return np.stack([ids[start : start + context_length + 1] for start in starts]).astype(np.int64)


class DrawnBatches(IterableDataset[TokenBatch]):
    """Batches drawn as they are asked for, other ones in every loader process.

    `draw` gives windows of ``batch seq+1`` ids by a generator; `seed` has parts for run, rank and split.
    """

    def __init__(self, draw: Callable[[np.random.Generator], Windows], seed: tuple[int, ...]) -> None:
        self._draw, self._seed = draw, seed

    def __iter__(self) -> Iterator[TokenBatch]:
        rng = np.random.default_rng((*self._seed, _worker()))
        while True:
            windows = torch.from_numpy(self._draw(rng))
            yield TokenBatch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


class PrebuiltBatches(IterableDataset[TokenBatch]):
    """Batches that exist, in turn; loader processes start at different ones."""

    def __init__(self, batches: Sequence[TokenBatch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[TokenBatch]:
        return itertools.islice(itertools.cycle(self.batches), _worker() % len(self.batches), None)


def _worker() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id
