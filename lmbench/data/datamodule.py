"""The LightningDataModules of lmbench: random tokens or text, on the device or through a loader, and bare shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lmbench.data.corpus import Corpus, TokenIds, corpus_tokens, open_corpus
from lmbench.device import device_of
from lmbench.errors import UsageError, check_at_least, check_known, tell
from lmbench.files import cache_folder
from lmbench.records.vocabulary import Values
from lmbench.sizes import DEFAULT_VOCAB_SIZE

# With fewer batches, training would resemble training on one fixed batch, which is faster than on real data.
MINIMUM_BATCHES = 8
SOURCES = ("random", "text")
PLACEMENTS = ("device", "pinned")
# Share of a text's tokens, at its end, that is held out for validation.
HELD_OUT_FRACTION = 0.1


class TokenBatch(NamedTuple):
    """Token ids, and the ids to predict, which are one position later: int64 of shape ``batch seq`` each."""

    tokens: Tensor
    targets: Tensor


@dataclass(eq=False)
class DrawnBatches(IterableDataset[TokenBatch]):
    """Batches that are drawn when they are asked for, differently in every loader process.

    Attributes:
        source: the token ids of a text, from which windows with random starts are taken; or a vocabulary size, below
            which ids are drawn uniformly.
        batch_size: sequences in a batch.
        context_length: tokens in a sequence.
        seed: seeds of run, rank and split.
    """

    source: TokenIds | int
    batch_size: int
    context_length: int
    seed: tuple[int, ...]

    def __iter__(self) -> Iterator[TokenBatch]:
        rng, source, length = np.random.default_rng((*self.seed, _worker())), self.source, self.context_length + 1
        while True:
            if isinstance(source, int):
                windows = rng.integers(source, size=(self.batch_size, length), dtype=np.int64)
            else:
                starts = rng.integers(source.size - self.context_length, size=self.batch_size)
                windows = np.stack([source[start : start + length] for start in starts]).astype(np.int64)
            ids = torch.from_numpy(windows)
            yield TokenBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


@dataclass(eq=False)
class PrebuiltBatches(IterableDataset[TokenBatch]):
    """Given batches in turn, without end; loader processes start at different ones."""

    batches: Sequence[TokenBatch]

    def __iter__(self) -> Iterator[TokenBatch]:
        return itertools.islice(itertools.cycle(self.batches), _worker() % len(self.batches), None)


def _worker() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


class TokenData(LightningDataModule):
    """Endless batches of (tokens, targets), int64 of shape ``batch seq``; targets are the next tokens.

    Validation draws other batches (from text: from its held-out end).

    Args:
        source: uniformly random tokens, or text.
        batch_size: sequences in a batch.
        context_length: tokens in a sequence.
        vocab_size: number of token ids; text is tokenized to it.
        num_batches: number of different batches, built before the first step (not for text through a loader).
        placement: ``device`` keeps the built batches on the training device, so that no transfer is left; ``pinned``
            sends each through a DataLoader, from pinned memory where there is CUDA (text is drawn anew for every
            batch).
        num_workers: processes of that DataLoader.
        seed: seed of all random numbers.
        text_files: files or patterns of text; none takes the sources of Python's standard library.
        cache_dir: folder for tokenized text; by default ``lmbench`` in the user's cache folder.

    Raises:
        UsageError: a setting is out of its range, files are missing or empty, or the text is too short for a batch. In
            ``setup`` also: the model's vocabulary is smaller than the data's.
    """

    def __init__(
        self,
        *,
        source: Literal["random", "text"] = "random",
        batch_size: int = 4,
        context_length: int = 512,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        num_batches: int = MINIMUM_BATCHES,
        placement: Literal["device", "pinned"] = "device",
        num_workers: int = 0,
        seed: int = 0,
        text_files: list[str] | None = None,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        self.source = source
        self.batch_size = batch_size
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.num_batches = num_batches
        self.placement = placement
        self.num_workers = num_workers
        self.seed = seed
        self.text_files = list(text_files or [])
        self.cache_dir = Path(cache_dir or cache_folder()).expanduser()
        self._text: tuple[Corpus, TokenIds] | None = None
        check_known("source", source, SOURCES)
        check_known("placement", placement, PLACEMENTS)
        check_at_least(1, "data", batch_size=batch_size, context_length=context_length, vocab_size=vocab_size)
        check_at_least(0, "data", num_workers=num_workers, seed=seed)
        check_at_least(MINIMUM_BATCHES, "data", num_batches=num_batches)
        if num_workers and placement == "device":
            raise UsageError(
                "data.num_workers needs data.placement pinned: batches on the device have no loader processes"
            )

    def prepare_data(self) -> None:
        """Tokenize the text into the cache, once for all processes of a machine."""
        if self.source == "text":
            self._read_text()

    def setup(self, stage: str) -> None:
        if self.trainer is not None:
            self._check_vocabulary(self.trainer.lightning_module)
        if self.source == "text":
            self._text = self._read_text()
            self._text_part(held_out=stage != "fit")

    def _check_vocabulary(self, module: LightningModule) -> None:
        """Raises UsageError where the module's vocabulary is smaller than the data's."""
        size = getattr(module, "vocab_size", None)
        if size is not None and size < self.vocab_size:
            raise UsageError(
                f"the data has {self.vocab_size} token ids but the model's vocab_size is {size}; "
                "give both the same vocab_size"
            )
        rows = max((part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)), default=None)
        if rows is not None and rows < self.vocab_size:
            # No error, since tokens may be embedded by something else.
            tell(
                f"the data has {self.vocab_size} token ids but the module's largest embedding has {rows} rows; "
                f"if it embeds the tokens, give --data.vocab_size={rows}"
            )

    def train_dataloader(self) -> Iterable[TokenBatch]:
        return self._loader(held_out=False)

    def val_dataloader(self) -> Iterable[TokenBatch]:
        return self._loader(held_out=True)

    def _loader(self, held_out: bool) -> Iterable[TokenBatch]:
        """The batches for the Trainer's rank and device, or for rank 0 on the CPU without a Trainer.

        Ranks that compute a batch together get the same batches.
        """
        device, rank = torch.device("cpu"), 0
        if self.trainer is not None:
            device = self.trainer.strategy.root_device
            rank = (self.trainer.distributed_sampler_kwargs or {}).get("rank", 0)
        source = self.vocab_size if self.source == "random" else self._text_part(held_out)
        dataset: IterableDataset[TokenBatch] = DrawnBatches(
            source, self.batch_size, self.context_length, (self.seed, rank, int(held_out))
        )
        if not self._draws_anew:
            built = list(itertools.islice(dataset, self.num_batches))
            if self.placement == "device":
                return PrebuiltBatches([TokenBatch(tokens.to(device), targets.to(device)) for tokens, targets in built])
            dataset = PrebuiltBatches(built)
        return DataLoader(
            dataset,
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=device_of(device).pins_memory,
            persistent_workers=self.num_workers > 0,
        )

    def tokens_per_batch(self, batch: TokenBatch) -> int:
        """Tokens in a batch, for modules that do not count them themselves."""
        return batch.tokens.numel()

    def describe(self) -> Values:
        """Facts about the data for the run's record; those about a text's corpus only after ``setup``."""
        names = ("source", "batch_size", "context_length", "vocab_size", "placement", "num_workers", "seed")
        facts = {name: getattr(self, name) for name in names}
        facts["num_batches"] = None if self._draws_anew else self.num_batches
        if self._text is not None:
            corpus, ids = self._text
            facts |= {
                "corpus": corpus.name,
                "corpus_sha256": corpus.sha256,
                "corpus_files": len(corpus.files),
                "corpus_bytes": corpus.size_bytes,
                "corpus_tokens": int(ids.size),
            }
        return facts

    @property
    def _draws_anew(self) -> bool:
        return self.source == "text" and self.placement == "pinned"

    def _text_part(self, held_out: bool) -> TokenIds:
        """The token ids of the text for training, or those held out for validation."""
        _, ids = self._text or self._read_text()
        training_count = round(ids.size * (1 - HELD_OUT_FRACTION))
        part = ids[training_count:] if held_out else ids[:training_count]
        needed = self.batch_size * self.context_length + 1
        if part.size < needed:
            raise UsageError(
                f"the text has {part.size} tokens for {'validation' if held_out else 'training'}, one batch "
                f"needs {needed}; give more text, or a smaller batch_size or context_length"
            )
        return part

    def _read_text(self) -> tuple[Corpus, TokenIds]:
        corpus = open_corpus(self.text_files)
        return corpus, corpus_tokens(corpus, self.vocab_size, self.cache_dir)


class BatchShape(NamedTuple):
    """A batch without tensors: the number of its sequences, and of positions in each."""

    batch_size: int
    context_length: int


class ShapeData(LightningDataModule):
    """Endless batches of one shape without tensors: nothing is drawn, moved or kept in memory.

    Args:
        batch_size: sequences in a batch.
        context_length: positions in a sequence.

    Raises:
        UsageError: a value is below 1.
    """

    def __init__(self, *, batch_size: int = 4, context_length: int = 512) -> None:
        super().__init__()
        check_at_least(1, "data", batch_size=batch_size, context_length=context_length)
        self.batch_size, self.context_length = batch_size, context_length
        self.shape = BatchShape(batch_size, context_length)

    def train_dataloader(self) -> Iterable[BatchShape]:
        return itertools.repeat(self.shape)

    val_dataloader = train_dataloader

    def describe(self) -> Values:
        """The shape, for the run's record."""
        return {"source": "random", **self.shape._asdict()}
