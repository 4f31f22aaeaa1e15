"""Text files become token ids: which files, which hash, and a cache that survives damage and company."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from lmbench.data import corpus as corpora
from lmbench.data.corpus import END_OF_TEXT_ID, Corpus, corpus_tokens, open_corpus, standard_library
from lmbench.errors import UsageError

TEXT = "".join(f"line {i} of a text whose words repeat and repeat\n" for i in range(400))


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    for name, text in (("b.txt", TEXT), ("a.txt", TEXT[:5000] + "naïve 日本語\n"), ("empty.txt", "")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    return open_corpus([str(tmp_path / "*.txt")])


def text_of(ids: np.ndarray, corpus: Corpus, vocab_size: int) -> str:
    """Decode with the tokenizer that the same corpus gives again."""
    from tokenizers import decoders

    tokenizer = corpora._train(corpus, vocab_size)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def test_tokens_are_the_text_with_an_end_after_each_file(corpus, tmp_path):
    ids = corpus_tokens(corpus, 400, tmp_path / "cache")
    assert ids.dtype == np.uint16
    assert ids.max() < 400
    assert np.flatnonzero(ids == END_OF_TEXT_ID).size == 2
    assert ids[-1] == END_OF_TEXT_ID
    expected = TEXT[:5000] + "naïve 日本語\n" + "<|endoftext|>" + TEXT + "<|endoftext|>"
    assert text_of(ids, corpus, 400) == expected


def test_the_smallest_vocabulary_has_one_token_a_byte_and_large_ones_take_four_bytes(corpus, tmp_path):
    assert corpus_tokens(corpus, 257, tmp_path / "cache").size == corpus.size_bytes + 2
    assert corpus_tokens(corpus, 70_000, tmp_path / "cache").dtype == np.uint32
    with pytest.raises(UsageError, match="vocab_size is 256; byte-level tokens of text need at least 257"):
        corpus_tokens(corpus, 256, tmp_path / "cache")


def test_bytes_that_are_no_utf8_are_kept(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 \x00\xff and more\n")
    corpus = open_corpus([str(tmp_path / "latin.txt")])
    ids = corpus_tokens(corpus, 300, tmp_path / "cache")
    assert text_of(ids, corpus, 300) == "caf\xe9 \x00\xff and more\n<|endoftext|>"


def test_large_files_come_in_pieces_that_lose_nothing(tmp_path, monkeypatch):
    path = tmp_path / "large.txt"
    path.write_text("ä" * 5000 + "\n" + TEXT + "no end of line", encoding="utf-8")
    whole = corpus_tokens(open_corpus([str(path)]), 257, tmp_path / "one")
    monkeypatch.setattr(corpora, "_BLOCK_BYTES", 512)
    monkeypatch.setattr(corpora, "_ENCODED_PIECES", 4)
    pieces = list(open_corpus([str(path)]).pieces())
    assert len(pieces) > 10
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(text for text, _ in pieces) == path.read_text(encoding="utf-8")
    assert np.array_equal(whole, corpus_tokens(open_corpus([str(path)]), 257, tmp_path / "two"))


def test_the_hash_is_of_contents_in_order_not_of_names(tmp_path):
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).write_text("one" if name in "ac" else "two")
    hashes = [open_corpus([str(tmp_path / name) for name in names]).sha256 for names in ("ab", "cd", "ba", "ac")]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_the_cache_is_reused_and_keyed_by_content_and_vocabulary(corpus, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = corpus_tokens(corpus, 400, cache)
    with monkeypatch.context() as patch:
        patch.setattr(corpora, "_train", None)  # building anything now fails
        assert np.array_equal(first, corpus_tokens(open_corpus([str(tmp_path / "*.txt")]), 400, cache))
    corpus_tokens(corpus, 401, cache)
    (tmp_path / "b.txt").write_text(TEXT + "more")
    corpus_tokens(open_corpus([str(tmp_path / "*.txt")]), 400, cache)
    assert len(list(cache.iterdir())) == 3


def test_a_damaged_cache_is_rebuilt(corpus, tmp_path):
    cache = tmp_path / "cache"
    ids = np.array(corpus_tokens(corpus, 400, cache))
    (entry,) = cache.iterdir()
    data = entry.read_bytes()
    for damaged in (data[:-7], data[:-6], data[:-5] + b"x" + data[-4:], b""):
        entry.write_bytes(damaged)
        assert np.array_equal(corpus_tokens(corpus, 400, cache), ids)
        assert entry.read_bytes() == data


def _build_at_once(arguments: tuple[list[str], str]) -> tuple[int, int]:
    files, cache = arguments
    ids = corpus_tokens(open_corpus(files), 500, Path(cache))
    return ids.size, int(ids.astype(np.int64).sum())


def test_processes_that_build_at_once_do_not_harm_each_other(corpus, tmp_path):
    files, cache = [str(tmp_path / "*.txt")], tmp_path / "cache"
    with get_context("spawn").Pool(3) as pool:
        results = pool.map(_build_at_once, [(files, str(cache))] * 6, chunksize=1)
    assert len(set(results)) == 1
    assert len(list(cache.iterdir())) == 1


def test_a_failed_build_leaves_nothing_behind(corpus, tmp_path, monkeypatch):
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpora, "_encode", full_disk)
    with pytest.raises(UsageError, match=r"cannot be written \(No space left on device\); name another with cache_dir"):
        corpus_tokens(corpus, 400, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_default_corpus_is_the_standard_library_without_tests():
    corpus = standard_library()
    names = {path.name for path in corpus.files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any(part in {"test", "tests", "site-packages"} for path in corpus.files for part in path.parts)
    assert corpus.size_bytes > 5_000_000
    assert corpus.files == standard_library().files
    assert open_corpus([]).files == corpus.files


def test_missing_and_empty_files_are_named(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    for entry, message in (
        ("none.txt", "none.txt does not exist"),
        ("*.md", r"\*.md does not exist; name files or a pattern that matches some"),
        ("empty.txt", "empty.txt is empty"),
        ("*.txt", "are all empty"),
        ("folder", "folder is a folder; name its files, e.g. "),
    ):
        with pytest.raises(UsageError, match=message):
            open_corpus([str(tmp_path / entry)])
