"""Text files become token ids: the choice of files, their hash, and a cache that several processes share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import warm_server
from refusals import usage_error
from tables import cases

from lmbench.data import corpus as corpora
from lmbench.data.corpus import corpus_tokens, open_corpus, standard_library

TEXT = "".join(f"line {i} of a text whose words repeat and repeat\n" for i in range(400))


@pytest.fixture
def corpus(tmp_path):
    for name, text in (("b.txt", TEXT), ("a.txt", TEXT[:5000] + "naïve 日本語\n"), ("empty.txt", "")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "c.txt").write_bytes(b"no UTF-8: caf\xe9 \x00\xff\n")
    return open_corpus([str(tmp_path / "*.txt")])


def text_of(ids, corpus, vocab_size):
    """Decode with a tokenizer that is trained again on the same corpus."""
    from tokenizers import decoders

    tokenizer = corpora.train_tokenizer(corpus, vocab_size)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def test_tokens_are_the_text_with_an_end_after_each_file(corpus, tmp_path):
    ids = corpus_tokens(corpus, 400, tmp_path / "cache")
    assert (ids.dtype, ids.max() < 400, ids[-1]) == (np.uint16, True, 0)
    expected = TEXT[:5000] + "naïve 日本語\n" + "<|endoftext|>" + TEXT + "<|endoftext|>"
    expected += "no UTF-8: caf\ufffd \x00\ufffd\n<|endoftext|>"
    assert text_of(ids, corpus, 400) == expected


def test_the_smallest_vocabulary_has_one_token_a_byte_and_large_ones_take_four_bytes(corpus, tmp_path):
    # Three end-of-text ids, and two more bytes for each of two bytes that are not UTF-8.
    assert corpus_tokens(corpus, 257, tmp_path / "cache").size == corpus.size_bytes + 3 + 4
    assert corpus_tokens(corpus, 70_000, tmp_path / "cache").dtype == np.uint32


def test_large_files_come_in_pieces_that_lose_nothing(tmp_path, monkeypatch):
    path = tmp_path / "large.txt"
    path.write_text("ä" * 5000 + "\n" + TEXT + "no end of line", encoding="utf-8")
    corpus = open_corpus([str(path)])
    ids = corpus_tokens(corpus, 257, tmp_path / "at once")
    monkeypatch.setattr(corpora, "_BLOCK_BYTES", 512)
    monkeypatch.setattr(corpora, "_ENCODED_PIECES", 4)
    pieces = list(corpus.pieces())
    assert len(pieces) > 10
    assert "".join(pieces) == path.read_text(encoding="utf-8") + "<|endoftext|>"
    assert np.array_equal(ids, corpus_tokens(corpus, 257, tmp_path / "in pieces"))


def test_the_cache_is_keyed_by_content_and_vocabulary_and_reused(corpus, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    ids = np.array(corpus_tokens(corpus, 400, cache))
    with monkeypatch.context() as patch:
        patch.setattr(corpora, "train_tokenizer", None)  # building anything now fails
        assert np.array_equal(ids, corpus_tokens(open_corpus([str(tmp_path / "*.txt")]), 400, cache))
    corpus_tokens(corpus, 401, cache)
    (tmp_path / "b.txt").write_text(TEXT + "more")
    corpus_tokens(open_corpus([str(tmp_path / "*.txt")]), 400, cache)
    assert len(list(cache.iterdir())) == 3


def _print_sum(pattern, cache):
    print(corpus_tokens(open_corpus([pattern]), 500, cache).sum(dtype=int))


def test_processes_that_build_at_once_do_not_harm_each_other(corpus, tmp_path):
    build = partial(warm_server.run, target=partial(_print_sum, str(tmp_path / "*.txt"), tmp_path / "cache"))
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: build(), range(3)))
    assert {result.returncode for result in results} == {0}
    assert len({result.stdout for result in results}) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_the_default_corpus_is_the_standard_library_without_tests():
    corpus = standard_library()
    assert {"argparse.py", "dataclasses.py"} <= {path.name for path in corpus.files}
    assert not any(part in {"test", "tests", "site-packages"} for path in corpus.files for part in path.parts)
    assert corpus.size_bytes > 5_000_000
    assert open_corpus([]).files == corpus.files


@cases(r"""
entry | message
none.txt | none.txt is no file
*.md | \*.md is no file; name files, or a pattern such as
folder | folder is no file
*.txt | are all empty
""")
def test_missing_and_empty_files_are_named(entry, message, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    with usage_error(message):
        open_corpus([str(tmp_path / entry)])
