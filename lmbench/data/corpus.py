"""Text corpora as token ids: their files, hash and text, byte-level BPE trained locally, and a cache keyed by content.

A cache file holds the ids and nothing else. It is written under another name and renamed, so that two processes may
build it at once.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import math
import os
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lmbench.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
#: All byte values and the end of a text: with fewer ids, not every text can be written.
MINIMUM_VOCAB_SIZE = 257
#: The tokenizer learns its merges from every n-th piece, about this much in all: from all of the standard
#: library, 12 MB, it learns for 1.2 s instead of 0.6 s, and makes 1 % fewer tokens.
TRAINING_BYTES = 4_000_000

_BLOCK_BYTES = 1 << 20
#: Pieces of text that are encoded at once, in threads; of large files some 64 MiB.
_ENCODED_PIECES = 64
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

TokenIds = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Corpus:
    """Text files in a fixed order; a name for the record, which is not part of the hash."""

    name: str
    files: tuple[Path, ...]

    @cached_property
    def sha256(self) -> str:
        """Hash of all contents in order, each after its length; names and places do not count."""
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(path.stat().st_size.to_bytes(8, "little"))
            with path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
        return digest.hexdigest()

    @cached_property
    def size_bytes(self) -> int:
        """Bytes in all files."""
        return sum(path.stat().st_size for path in self.files)

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """All text, in pieces of at most about 2 MiB that end at a line's end where there is one.

        Yields each piece with True where it is the last of its file. Bytes that are no UTF-8 are read as Latin-1, which
        gives every byte a character of its own, so any file can be tokenized and none of it is lost.
        """
        for path in self.files:
            with path.open("rb") as file:
                # The rest of a block's last line, as long as that line is not a block long itself.
                blocks = iter(lambda: file.read(_BLOCK_BYTES) + file.readline(_BLOCK_BYTES), b"")
                for block, following in itertools.pairwise(itertools.chain(blocks, [None])):
                    try:
                        text = (block or b"").decode("utf-8")
                    except UnicodeDecodeError:
                        text = (block or b"").decode("latin-1")
                    yield text, following is None


def open_corpus(text_files: Sequence[str]) -> Corpus:
    """The corpus of the named files or patterns (``**`` for all levels); of none, the standard library's.

    Raises:
        UsageError: a name or pattern without a file, or no text at all.
    """
    if not text_files:
        return standard_library()
    files: dict[Path, None] = {}
    for entry in text_files:
        path = Path(entry).expanduser()
        # Path.glob would refuse an absolute pattern.
        names = [path] if path.exists() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
        matches = [Path(name).resolve() for name in names if Path(name).is_file()]
        if not matches:
            raise UsageError(f"text file {entry} is no file; name files, or a pattern such as folder/**/*.txt")
        files |= dict.fromkeys(matches)
    corpus = Corpus(" ".join(text_files), tuple(files))
    if corpus.size_bytes == 0:
        raise UsageError(f"the text files {corpus.name} are all empty; name files with text in them")
    return corpus


def standard_library() -> Corpus:
    """Sources of the running Python's standard library without its test folders: text without a network."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return Corpus("python standard library", tuple(sorted(files)))


def corpus_tokens(corpus: Corpus, vocab_size: int, cache_dir: Path) -> TokenIds:
    """All token ids of a corpus, below ``vocab_size``, as a read-only memory map; built if not cached.

    Raises:
        UsageError: a vocabulary below 257, a file that cannot be read, or a cache folder that cannot be written.
    """
    if vocab_size < MINIMUM_VOCAB_SIZE:
        raise UsageError(f"vocab_size is {vocab_size}; byte-level tokens of text need at least {MINIMUM_VOCAB_SIZE}")
    dtype: Any = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    try:
        parts = (corpus.sha256, vocab_size, TRAINING_BYTES, END_OF_TEXT, version("tokenizers"))
        path = cache_dir / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}.tokens"
        if not path.exists():
            _build(corpus, vocab_size, path, dtype)
        return np.memmap(path, dtype, mode="r")
    except OSError as error:
        raise UsageError(
            f"the text files or the token cache {cache_dir} (another: cache_dir) cannot be used: {error}"
        ) from error


def _build(corpus: Corpus, vocab_size: int, path: Path, dtype: Any) -> None:
    """Write the ids of each piece of text, with the end-of-text id after each file."""
    tokenizer, pieces = train_tokenizer(corpus, vocab_size), corpus.pieces()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        new = Path(scratch, "tokens")
        with new.open("wb") as file:
            while batch := list(itertools.islice(pieces, _ENCODED_PIECES)):
                encodings = tokenizer.encode_batch_fast([text for text, _ in batch])
                for encoding, (_, is_last) in zip(encodings, batch, strict=True):
                    np.asarray(encoding.ids + [END_OF_TEXT_ID] * is_last, dtype).tofile(file)
        new.replace(path)


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """A byte-level BPE of the corpus itself, the same whenever it is trained."""
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
    tokenizer.train_from_iterator((text for text, _ in itertools.islice(corpus.pieces(), 0, None, every)), trainer)
    return tokenizer
