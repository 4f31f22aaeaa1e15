"""Files of others: only regular ones are read, and no more of them than is allowed."""

from __future__ import annotations

import gzip
import os
import socket
import tracemalloc
from pathlib import Path

import pytest

from lmbench.files import Unreadable, inside, is_file, open_unpacked, read_file, read_unpacked

KIB, MIB = 2**10, 2**20
TOO_LARGE = "it holds more than 1 MiB, which is the most that is read"


def _why(path: Path, most_bytes: int = KIB, follows_links: bool = False) -> str:
    with pytest.raises(Unreadable) as refused:
        read_file(path, most_bytes, follows_links)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_regular_file_is_read_up_to_the_limit_and_not_beyond(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x" * MIB)
    assert read_file(path, MIB) == b"x" * MIB
    # A sparse terabyte, which no memory holds.
    os.truncate(path, 2**40)
    assert _why(path, MIB) == TOO_LARGE
    # A file that tells no size.
    assert Path("/proc/self/status").stat().st_size == 0
    assert _why(Path("/proc/self/status"), 10).startswith("it holds more than")


def test_pipes_sockets_devices_and_folders_are_told_and_not_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        # By a short name: a socket's path has 107 characters at most.
        monkeypatch.chdir(tmp_path)
        listener.bind("socket")
        assert _why(tmp_path / "pipe") == "it is a pipe, no file"
        assert _why(tmp_path / "socket") == "it is a socket, no file"
    assert _why(Path("/dev/zero"), follows_links=True) == "it is a device, no file"
    assert _why(tmp_path) == "it is a folder, no file"
    assert _why(tmp_path / "nothing") == "it is missing"


def test_a_link_is_followed_within_its_folder_only_unless_the_user_named_it(tmp_path):
    folder = tmp_path / "result"
    folder.mkdir()
    (tmp_path / "foreign").write_text("foreign")
    (folder / "own").write_text("own")
    for name, target in {"in": "own", "out": "../foreign", "zero": "/dev/zero", "round": "round"}.items():
        (folder / name).symlink_to(target)
    assert read_file(folder / "in", KIB) == b"own"
    for name in ("out", "zero", "round"):
        assert _why(folder / name) == f"'{name}' {'is no path' if name == 'round' else 'leads out of its folder'}"
        assert not is_file(folder / name)
    assert is_file(folder / "in")
    assert read_file(folder / "out", KIB, follows_links=True) == b"foreign"
    assert _why(folder / "zero", follows_links=True) == "it is a device, no file"


def test_gzip_is_bounded_by_what_comes_out(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(bytes(64 * 2**20)))
    tracemalloc.start()
    with pytest.raises(Unreadable, match="it holds more than 1 MiB"):
        read_unpacked(path, 2**20)
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()
    path.write_bytes(gzip.compress(b"one\ntwo\n"))
    assert read_unpacked(path, 8) == b"one\ntwo\n"
    with open_unpacked(path, 8) as stream:
        assert [stream.readline(2**20) for _ in range(3)] == [b"one\n", b"two\n", b""]


def test_damaged_gzip_says_so_in_a_line(tmp_path):
    path, packed = tmp_path / "a.gz", gzip.compress(os.urandom(1000))
    damaged = [
        packed[:500], packed[:200] + b"\xff" * 300 + packed[500:], packed[:-8] + bytes(8), b"\x1f\x8b"
    ]  # fmt: skip
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(Unreadable, match="it is damaged: "):
            read_unpacked(path, 2**20)


def test_a_recorded_path_never_leaves_its_folder(tmp_path):
    folder = tmp_path / "result"
    (folder / "below").mkdir(parents=True)
    (folder / "link").symlink_to("..")
    assert inside(folder, "below/trace.json") == folder / "below" / "trace.json"
    for name in ("..", ".", "../result2/x", "/etc/passwd", "below/../../x", "link/x", "a\0b"):
        with pytest.raises(Unreadable):
            inside(folder, name)
