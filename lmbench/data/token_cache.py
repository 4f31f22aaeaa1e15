"""A corpus as token ids: byte-level BPE trained locally, its output cached as a memory map keyed by content.

A cache file is one line of JSON padded to a fixed length, then the ids. It is written under a name of its own
and renamed into place whole, so two processes may build the same entry at once; its checksum is verified
whenever it is opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lmbench.data.corpus import Corpus
from lmbench.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
# All byte values and the end of a text: with fewer ids, not every text can be written.
MINIMUM_VOCAB_SIZE = 257
# The tokenizer learns its merges from every n-th piece, about this much in all: from all of the standard
# library, 12 MB, it learns for 1.2 s instead of 0.6 s, and makes 1 % fewer tokens.
TRAINING_BYTES = 4_000_000

_HEADER_BYTES = 512
_ENCODE_BYTES = 16 << 20

TokenIds = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def default_cache_dir() -> Path:
    """``lmbench`` in the user's cache folder (XDG_CACHE_HOME, else ``~/.cache``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmbench"


def corpus_tokens(corpus: Corpus, vocab_size: int, cache_dir: Path) -> TokenIds:
    """All token ids of a corpus, below ``vocab_size``, as a read-only memory map; built if not cached.

    Raises:
        UsageError: a vocabulary below 257, or a cache folder that cannot be written.
    """
    if vocab_size < MINIMUM_VOCAB_SIZE:
        raise UsageError(f"vocab_size is {vocab_size}; byte-level tokens of text need at least {MINIMUM_VOCAB_SIZE}")
    path = cache_dir / f"{_key(corpus, vocab_size)}.tokens"
    tokens = _open(path)
    if tokens is None:
        _build(corpus, vocab_size, path)
        tokens = _open(path)
    if tokens is None:
        raise UsageError(f"the token cache {path} is damaged right after it was written; check the disk")
    return tokens


def _key(corpus: Corpus, vocab_size: int) -> str:
    """What the ids depend on."""
    parts = (corpus.sha256, vocab_size, TRAINING_BYTES, END_OF_TEXT, version("tokenizers"))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _open(path: Path) -> TokenIds | None:
    """The memory map of a cache file, or None where it is missing, cut short or altered."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(_HEADER_BYTES))
        dtype, count, checksum = np.dtype(header["dtype"]), int(header["tokens"]), int(header["crc32"])
        tokens: Any = np.memmap(path, dtype=dtype, mode="r", offset=_HEADER_BYTES, shape=(count,))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return tokens if _checksum(tokens) == checksum else None


def _checksum(tokens: TokenIds) -> int:
    checksum = 0
    for start in range(0, tokens.size, _ENCODE_BYTES):
        checksum = zlib.crc32(np.ascontiguousarray(tokens[start : start + _ENCODE_BYTES]).data, checksum)
    return checksum


def _build(corpus: Corpus, vocab_size: int, path: Path) -> None:
    tokenizer = _train(corpus, vocab_size)
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, delete=False) as file:
            try:
                _write(file.file, _encode(corpus, tokenizer), dtype)
                file.flush()
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise UsageError(
            f"the token cache {path.parent} cannot be written ({error.strerror}); name another with cache_dir"
        ) from error


def _write(file: Any, batches: Iterator[list[int]], dtype: np.dtype[Any]) -> None:
    """Write the ids as they come, then the header that makes them valid."""
    file.write(b" " * _HEADER_BYTES)
    count = checksum = 0
    for ids in batches:
        data = np.asarray(ids, dtype=dtype).tobytes()
        file.write(data)
        count, checksum = count + len(ids), zlib.crc32(data, checksum)
    header = json.dumps({"dtype": dtype.str, "tokens": count, "crc32": checksum}).encode()
    file.seek(0)
    file.write(header.ljust(_HEADER_BYTES - 1) + b"\n")


def _train(corpus: Corpus, vocab_size: int) -> Tokenizer:
    # Unless this says that its threads are wanted, the library warns in every worker forked later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    every = math.ceil(corpus.size_bytes / TRAINING_BYTES)
    texts = (text for index, (text, _) in enumerate(corpus.pieces()) if index % every == 0)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _encode(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Ids in batches, several files or a part of one at a time, with the end-of-text id after each file."""
    texts: list[str] = []
    lasts: list[bool] = []
    size = 0

    def flush() -> list[int]:
        ids: list[int] = []
        for encoding, last in zip(tokenizer.encode_batch_fast(texts), lasts, strict=True):
            ids += encoding.ids
            if last:
                ids.append(END_OF_TEXT_ID)
        return ids

    for text, last in corpus.pieces():
        texts.append(text)
        lasts.append(last)
        size += len(text)
        if size >= _ENCODE_BYTES:
            yield flush()
            texts, lasts, size = [], [], 0
    yield flush()
