"""Snapshots are pickles of strangers: nothing in one runs, and what it may take is bounded and said in a line."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import planted_memory
import pytest

from lmbench.errors import UsageError
from lmbench.memory.history import pickled
from lmbench.memory.history.pickled import read_snapshot


class Touches:
    """Unpickled by `pickle.load`, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.path}",)


EMPTY: dict[str, Any] = {"segments": [], "device_traces": [[]]}


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        read_snapshot(path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500
    return str(refused.value)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda evil: evil,
        lambda evil: {**EMPTY, "x": evil},
        lambda evil: {"segments": [], "device_traces": [[{"action": "alloc", "frames": [evil]}]]},
    ],
)
def test_code_in_a_snapshot_does_not_run(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    trace = tmp_path / "ran"
    content = pickle.dumps(wrap(Touches(trace)))
    pickle.loads(content)
    assert trace.exists(), "the pickle must be one that runs code"
    trace.unlink()
    assert "names posix.system" in refusal(tmp_path / "evil.pickle", content)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"(ios\nsystem\n.", "names os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "names os.system"),
        (b"Pfoo\n.", "persistent id"),
        (b"\x80\x02\x82\x01.", "cannot be unpickled"),
    ],
)
def test_every_way_to_name_something_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    assert said in refusal(tmp_path / "s.pickle", content)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x80\x04}r\xff\xff\xff\x7f.", id="a memo of 32 GiB (LONG_BINPUT)"),
        pytest.param(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.", id="1 TiB of bytes (BINBYTES8)"),
        pytest.param(b"\x80\x04\x8d" + struct.pack("<Q", 1 << 33) + b"x.", id="8 GiB of text (BINUNICODE8)"),
        pytest.param(b"\x80\x05\x96" + struct.pack("<Q", 1 << 36) + b"x.", id="64 GiB of bytearray (BYTEARRAY8)"),
        pytest.param(b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"}.", id="a frame of 1 TiB (FRAME)"),
        pytest.param(b"\x80\x04(" + b"\x8f" * 6_000_000 + b"t.", id="6 million sets in 6 MB"),
    ],
)
def test_what_wants_more_memory_than_a_snapshot_is_refused(tmp_path: Path, content: bytes) -> None:
    assert "more memory" in refusal(tmp_path / "bomb.pickle", content)


def test_a_list_that_stands_at_a_million_places_is_counted_once_or_refused(tmp_path: Path) -> None:
    entry = {"action": "alloc", "addr": 1 << 40, "size": 512, "time_us": 1}
    many = [entry] * 20_000
    path = tmp_path / "s.pickle"
    assert "64 at most" in refusal(path, pickle.dumps({"segments": [], "device_traces": [many] * 20_000}))
    segments = [{"blocks": [{"size": 1}] * 20_000}] * 20_000
    assert "more than 100,000,000" in refusal(path, pickle.dumps({"segments": segments, "device_traces": []}))
    frames = [{"name": "f", "filename": "g.py", "line": 1}] * 20_000
    path.write_bytes(
        pickle.dumps({"segments": [], "device_traces": [[{**entry, "frames": frames} for _ in range(20_000)]]})
    )
    read = read_snapshot(path)
    assert (read.traces[0].count, len(read.stacks), len(read.stacks[0])) == (20_000, 1, 400)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "too early"),
        (b"hello world", "cannot be unpickled"),
        (pickle.dumps([1, 2]), "the file is no mapping"),
        (pickle.dumps({"a": 1}), "no `segments` and `device_traces`"),
        (pickle.dumps({"segments": [], "device_traces": [[7]]}), "an entry of device_traces[0] is no mapping"),
        (pickle.dumps({"segments": [], "device_traces": [[{"addr": 1}]]}), "no 'action'"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": []}]]}), "wrong type"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": "x"}]]}), "wrong type"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "size": 1 << 70}]]}), "out of range"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "size": -1}]]}), "out of range"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "size": 1 << 60}]]}), "out of range"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "frames": 3}]]}), "frames is no list"),
        (
            pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "frames": [{"line": []}]}]]}),
            "a frame is not",
        ),
        (pickle.dumps({"segments": [{"blocks": [1]}], "device_traces": []}), "no 'device'"),
        (pickle.dumps({**EMPTY, "external_annotations": [{"name": 1}]}), "an annotation is not"),
        (b"\x80\x04" + b"]" * 500_000 + b"a" * 499_999 + b".", "the file is no mapping"),
    ],
)
def test_what_is_no_snapshot_is_said_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    assert said in refusal(tmp_path / "s.pickle", content)


def test_a_torn_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = planted_memory.write(tmp_path / "s.pickle", planted_memory.planted_run().memory).read_bytes()
    for part in (0.1, 0.5, 0.999):
        refusal(tmp_path / "torn.pickle", whole[: int(len(whole) * part)])


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled, "MAX_FILE_BYTES", 1 << 20)
    path = tmp_path / "s.pickle"
    with path.open("wb") as file:
        file.truncate((1 << 20) + 1)
    assert "are read" in refusal(path, path.read_bytes())


def test_a_missing_file_and_a_folder_are_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_snapshot(tmp_path / "none.pickle")
    with pytest.raises(UsageError, match="is no file"):
        read_snapshot(tmp_path)


def test_modules_in_the_current_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file may have come in an archive with an `array.py` beside it."""
    path = planted_memory.write(tmp_path / "s.pickle", planted_memory.planted_run().memory)
    (tmp_path / "array.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    assert read_snapshot(path).traces[0].count == 80
