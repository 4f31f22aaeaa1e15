"""Files that somebody else made: only regular files are read, and only up to a limit."""

from __future__ import annotations

import gzip
import os
import tracemalloc
from pathlib import Path

import pytest

from lmbench.files import Unreadable, inside, is_file, is_folder, read_file

MIB = 2**20


def _refused(path, line, most_bytes=MIB, **options):
    with pytest.raises(Unreadable, match=line):
        read_file(path, most_bytes, **options)


def test_a_regular_file_is_read_up_to_the_limit_and_not_beyond(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x" * MIB)
    assert read_file(path, MIB) == b"x" * MIB
    # A sparse terabyte, which no memory holds.
    os.truncate(path, 2**40)
    _refused(path, "it holds more than 1 MiB, which is the most that is read")
    # A file that reports a size of 0.
    _refused(Path("/proc/self/status"), "it holds more than", 10)


def test_a_link_is_followed_within_its_folder_only_unless_the_user_named_it(tmp_path):
    folder = tmp_path / "result"
    folder.mkdir()
    (tmp_path / "foreign").write_text("foreign")
    (folder / "own").write_text("own")
    for name, target in {"in": "own", "out": "../foreign", "zero": "/dev/zero", "round": "round"}.items():
        (folder / name).symlink_to(target)
    assert read_file(folder / "in", MIB) == b"own"
    for name in ("out", "zero", "round"):
        _refused(folder / name, "is no path" if name == "round" else "leads out of its folder")
        assert not is_file(folder / name)
    assert is_file(folder / "in")
    assert read_file(folder / "out", MIB, follows_links=True) == b"foreign"
    (folder / "home").symlink_to(folder)
    assert [is_folder(path) for path in (folder, folder / "home", folder / "a\0b")] == [True, False, False]


def test_a_gzip_file_is_limited_by_its_unpacked_size(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(bytes(64 * MIB)))
    tracemalloc.start()
    _refused(path, "it holds more than 1 MiB", unpacks=True)
    assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    tracemalloc.stop()
    packed = gzip.compress(os.urandom(1000))
    for data in (packed[:500], packed[:200] + b"\xff" * 300 + packed[500:], packed[:-8] + bytes(8), b"\x1f\x8b"):
        path.write_bytes(data)
        _refused(path, "it is damaged: ", unpacks=True)


def test_a_recorded_path_never_leaves_its_folder(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "link").symlink_to("..")
    assert inside(tmp_path, "below/trace.json") == tmp_path / "below" / "trace.json"
    for name in ("..", ".", "../result2/x", "/etc/passwd", "below/../../x", "link/x", "a\0b"):
        with pytest.raises(Unreadable):
            inside(tmp_path, name)
