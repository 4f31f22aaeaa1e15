"""Text corpora: which files, their hash, and their bytes as text in pieces of bounded size."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from lmbench.errors import UsageError

_BLOCK_BYTES = 1 << 20
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


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

        Yields each piece with True where it is the last of its file. Bytes that are no UTF-8 are read as
        Latin-1, which gives every byte a character of its own, so any file can be tokenized and none of it is
        lost.
        """
        for path in self.files:
            with path.open("rb") as file:
                block = _read_piece(file)
                while block:
                    following = _read_piece(file)
                    yield _decode(block), not following
                    block = following


def open_corpus(text_files: Sequence[str]) -> Corpus:
    """The corpus of the named files or patterns (``**`` for all levels); of none, the standard library's.

    Raises:
        UsageError: a name or pattern without a file, a folder, an unreadable or an empty file, or no text at
        all.
    """
    if not text_files:
        return standard_library()
    files: dict[Path, None] = {}
    for entry in text_files:
        files.update(dict.fromkeys(_expand(entry)))
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
    if not files:
        raise UsageError(f"this Python has no standard library sources in {root}; name text_files instead")
    return Corpus("python standard library", tuple(sorted(files, key=lambda path: path.relative_to(root).parts)))


def _expand(entry: str) -> list[Path]:
    """Files of one name or pattern, sorted; an empty file is a mistake if named, not in a pattern."""
    path = Path(entry).expanduser()
    named = path.exists()
    # Path.glob would refuse an absolute pattern.
    found = [] if named else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
    paths = [path] if named else [Path(name) for name in found]
    if named and paths[0].is_dir():
        raise UsageError(f"text file {entry} is a folder; name its files, e.g. {entry.rstrip('/')}/**/*.txt")
    files = [path.resolve() for path in paths if path.is_file()]
    if not files:
        raise UsageError(f"text file {entry} does not exist; name files or a pattern that matches some")
    for path in files:
        if not os.access(path, os.R_OK):
            raise UsageError(f"text file {path} cannot be read; check its permissions")
    if named and files[0].stat().st_size == 0:
        raise UsageError(f"text file {entry} is empty; name files with text in them")
    return files


def _read_piece(file: BinaryIO) -> bytes:
    """The next block and the rest of its last line, as long as that line is not a block long itself."""
    return file.read(_BLOCK_BYTES) + file.readline(_BLOCK_BYTES)


def _decode(block: bytes) -> str:
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError:
        return block.decode("latin-1")
