"""Snapshots are pickles that anybody may have made: their code does not run, and bad ones are refused in one line."""

from __future__ import annotations

import os
import pickle

import planted_memory
from refusals import usage_error
from tables import cases

from lmbench.memory import snapshot
from lmbench.memory.findings import examine
from lmbench.memory.snapshot import read_snapshot, replay


class Touches:
    """An object that makes a file when `pickle.load` reads it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def refusal(path, content):
    path.write_bytes(content)
    with usage_error(r"\A.{,500}\Z") as refused:
        examine(path)
    return str(refused.value)


def of_entry(**entry):
    return pickle.dumps({"segments": [], "device_traces": [[entry]]})


def test_code_in_a_snapshot_does_not_run(tmp_path):
    mark = tmp_path / "ran"
    content = of_entry(action="alloc", frames=[Touches(mark)])
    pickle.loads(content)
    assert mark.exists(), "the pickle must be one that runs code"
    mark.unlink()
    assert "names posix.system" in refusal(tmp_path / "evil.pickle", content)
    assert not mark.exists()


@cases(
    "content | reason",
    (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "names os.system"),
    (b"Pfoo\n.", "persistent id"),
    (b"", "EOFError"),
    (pickle.dumps({"a": 1}), "missing required field `segments`"),
    (of_entry(action="alloc", size=1 << 60), "size"),
    (of_entry(action="alloc", frames=[{"line": []}]), "no list of frames"),
    (pickle.dumps({"segments": [], "device_traces": [[]]}), "is empty"),
    (pickle.dumps({"segments": [], "device_traces": [[]] * 65}), "length <= 64"),
    (b"\x80\x04" + b"]" * 500_000 + b"a" * 499_999 + b".", "no snapshot"),
)
def test_a_file_that_is_no_snapshot_is_refused_in_one_line(tmp_path, content, reason):
    assert reason in refusal(tmp_path / "s.pickle", content)


def test_a_torn_a_missing_and_a_too_large_file_are_refused(tmp_path, monkeypatch):
    content = planted_memory.write(tmp_path / "s.pickle", planted_memory.planted_run().memory).read_bytes()
    for size in (len(content) // 10, len(content) - 10):
        refusal(tmp_path / "torn.pickle", content[:size])
    for path in (tmp_path / "none.pickle", tmp_path):
        with usage_error(str(path)):
            read_snapshot(path)
    monkeypatch.setattr(snapshot, "MAX_FILE_BYTES", 1 << 10)
    assert "MiB" in refusal(tmp_path / "s.pickle", content)


def test_a_list_of_frames_that_entries_share_is_read_once(tmp_path):
    frames = [{"name": "f", "filename": "g.py", "line": 1}] * 20_000
    entries = [{"action": "alloc", "addr": 1 << 40, "size": 512, "frames": frames} for _ in range(20_000)]
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [entries]}))
    played = replay(read_snapshot(path), 0)
    assert (len(played.entries), len(played.stacks), len(played.stacks[0])) == (20_000, 2, 400)
