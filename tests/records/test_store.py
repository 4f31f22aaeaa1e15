"""Writing results: folders that never collide, run.json whole or not at all, steps as strict JSON."""

from __future__ import annotations

import errno
import json
import resource
from unittest.mock import Mock

import pytest
import yaml

from lmbench.errors import UsageError
from lmbench.records import store
from lmbench.records.load import load_run
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.store import RunFolder


def test_a_taken_run_id_is_refused_and_left_alone(tmp_path):
    RunFolder.create(tmp_path, run_id="mine").write_run(RunRecord(SCHEMA_VERSION, "ok"))
    with pytest.raises(UsageError, match="'mine' exists already"):
        RunFolder.create(tmp_path, run_id="mine")
    assert load_run(tmp_path / "mine").outcome == "ok"


# Root may write anywhere but into the kernel's own file systems.
@pytest.mark.parametrize(
    ("folder", "run_id", "problem"),
    yaml.safe_load("""
- [., "", only letters]
- [., .., only letters]
- [., a/b, only letters]
- [., .hidden, only letters]
- [., a b, only letters]
- [file, null, a file stands in the way]
- [file/below, null, cannot be written]
- [/proc/results, null, "results folder '.*' cannot be written: .*; choose another one"]
"""),
)
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


def test_what_a_full_disk_does_not_take_waits_and_follows_when_there_is_room(tmp_path):
    folder, count = RunFolder.create(tmp_path), 0
    folder.write_run(RunRecord(SCHEMA_VERSION, "ok"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        while folder.error is None:
            folder.append_steps([StepRecord(step=step) for step in range(count, count + 7)])
            count += 7
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run, waiting = load_run(folder.path), folder.waiting_steps()
    assert (folder.error.errno, run.damage) == (errno.EFBIG, None)
    assert (folder.path / "steps.jsonl").stat().st_size == 10_000
    assert [step.step for step in [*run.steps, *waiting]] == list(range(count))
    assert folder.unwritten_count == len(waiting) > 0
    folder.close()
    assert (folder.error, folder.unwritten_count) == (None, 0)
    assert [step.step for step in load_run(folder.path).steps] == list(range(count))
