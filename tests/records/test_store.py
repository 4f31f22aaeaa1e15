"""Writing results: a folder that cannot be made is refused, and run.json is replaced whole or not at all."""

from __future__ import annotations

import errno
import json
from unittest.mock import Mock

import pytest
from tables import cases

from lmbench.errors import UsageError
from lmbench.records import store
from lmbench.records.load import read_steps
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.store import RunFolder


# Tests may run as root, which can write everywhere except in the kernel's own file systems.
@cases("""
- [folder, run_id, problem]
- [., "", only letters]
- [., .., only letters]
- [., a/b, only letters]
- [., .hidden, only letters]
- [., a b, only letters]
- [file, null, a file stands in the way]
- [file/below, null, cannot be written]
- [/proc/results, null, "results folder '.*' cannot be written: .*; choose another one"]
""")
def test_a_folder_that_cannot_be_made_is_a_usage_error(tmp_path, folder, run_id, problem):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=problem):
        RunFolder.create(tmp_path / folder, run_id)
    assert len(list(tmp_path.iterdir())) == 1


def test_run_json_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = RunFolder.create(tmp_path)
    for outcome in ("ok", "running"):
        folder.write_run(RunRecord(SCHEMA_VERSION, outcome))
    monkeypatch.setattr(store.os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        folder.write_run(RunRecord(SCHEMA_VERSION, "ok"))
    assert [file.name for file in folder.path.iterdir()] == ["run.json"]
    assert json.loads((folder.path / "run.json").read_text())["outcome"] == "running"


@cases("missing", 0, 1, 2, 100)
def test_a_step_is_found_in_the_file_or_waits_but_not_both(missing, tmp_path, monkeypatch):
    """On a disk that gets full near the end of the second of three lines."""
    folder, write = RunFolder.create(tmp_path), store.os.write
    steps = [StepRecord(step=step, stage="window", is_warmup=False) for step in range(3)]
    folder.append_steps(steps[:1])
    room = (folder.path / "steps.jsonl").stat().st_size - missing

    def write_until_full(fd, data):
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count, room = write(fd, data[:room]), 0
        return count

    monkeypatch.setattr(store.os, "write", write_until_full)
    folder.append_steps(steps[1:])
    found = [record.step for _, record in read_steps(folder.path / "steps.jsonl") if record]
    assert found + [record.step for record in folder.waiting_steps()] == [0, 1, 2]
    assert folder.unwritten_count == 3 - len(found)
