"""Writing results: a folder that cannot be made is refused, and run.json is replaced whole or not at all."""

from __future__ import annotations

import errno
import json
from unittest.mock import Mock

import pytest
from refusals import usage_error
from tables import cases

from lmbench.records import store
from lmbench.records.run import SCHEMA_VERSION, RunRecord
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
    with usage_error(problem):
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
