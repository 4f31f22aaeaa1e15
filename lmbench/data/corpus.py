"""Turns text files into token ids, by a byte-level BPE trained on them, with a cache keyed by content.

A cache file holds the token ids alone. It is written under another name and then renamed, so that two processes may
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
#: One token id for each byte value and one for the end of a text; with fewer, some texts cannot be encoded.
MINIMUM_VOCAB_SIZE = 257
#: The tokenizer is trained on every n-th piece, about this many bytes in all. Training on all 12 MB of the standard
#: library takes 1.2 s instead of 0.6 s, and makes 1 % fewer tokens.
TRAINING_BYTES = 4_000_000

_BLOCK_BYTES = 1 << 20
#: Pieces of text that are encoded at once, in threads; about 64 MiB of large files.
_ENCODED_PIECES = 64
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

TokenIds = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Corpus:
    """Text files in a fixed order, with a name for the record."""

    name: str
    files: tuple[Path, ...]

    @cached_property
    def sha256(self) -> str:
        """Hash of the contents of all files in order, but not of their names and folders."""
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.files)

    def pieces(self) -> Iterator[str]:
        """All text in pieces of at most about 2 MiB, each up to a line's end unless the line is too long.

        A byte that is not UTF-8 becomes U+FFFD. END_OF_TEXT is the last piece of a file that has text.
        """
        for path in self.files:
            with path.open("rb") as file:
                # Complete the last line of each block, by at most another block.
                while block := file.read(_BLOCK_BYTES) + file.readline(_BLOCK_BYTES):
                    yield block.decode("utf-8", "replace")
            if path.stat().st_size:
                yield END_OF_TEXT


def open_corpus(text_files: Sequence[str]) -> Corpus:
    """The corpus of files, or of Python's standard library if there are none.

    Args:
        text_files: names of files, or patterns (``**`` stands for folders of any depth).

    Raises:
        UsageError: a name or pattern matches no file, or all files are empty.
    """
    if not text_files:
        return standard_library()
    files = dict[Path, None]()
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
    """Sources of the running Python's standard library without its tests, a text that needs no network."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return Corpus("python standard library", tuple(sorted(files)))


def corpus_tokens(corpus: Corpus, vocab_size: int, cache_dir: Path) -> TokenIds:
    """All token ids of a corpus, below ``vocab_size``, as a read-only memory map of its cache file.

    Builds the cache file if there is none.

    Raises:
        UsageError: ``vocab_size`` is below 257, a file cannot be read, or the cache folder cannot be written.
    """
    if vocab_size < MINIMUM_VOCAB_SIZE:
        raise UsageError(f"vocab_size is {vocab_size}; byte-level tokens of text need at least {MINIMUM_VOCAB_SIZE}")
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
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
    """Write the token ids of all text, with the end-of-text id after each file."""
    tokenizer, pieces = train_tokenizer(corpus, vocab_size), corpus.pieces()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        new = Path(scratch, "tokens")
        with new.open("wb") as file:
            while batch := list(itertools.islice(pieces, _ENCODED_PIECES)):
                for encoding in tokenizer.encode_batch_fast(batch):
                    np.asarray(encoding.ids, dtype).tofile(file)
        new.replace(path)


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer trained on the corpus; training again gives the same tokenizer."""
    # Without this setting the library warns in every loader process that is forked later.
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
    stride = math.ceil(corpus.size_bytes / TRAINING_BYTES)
    texts = (piece for piece in corpus.pieces() if piece != END_OF_TEXT)
    tokenizer.train_from_iterator(itertools.islice(texts, 0, None, stride), trainer)
    return tokenizer
