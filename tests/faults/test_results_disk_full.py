"""A disk that is really full: a tmpfs of 64 KiB."""

from __future__ import annotations

import errno

import pytest

from lmbench.records.load import load_run
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.store import RunFolder


@pytest.fixture
def disk(small_disk):
    return small_disk(64)


def _fill(folder):
    step = 0
    while True:
        folder.append_steps([StepRecord(step=step + i) for i in range(9)])
        step += 9


def test_a_full_disk_keeps_what_was_measured_and_recording_can_go_on(disk):
    ballast = disk / "ballast"
    ballast.write_bytes(b"\0" * 16 * 1024)
    folder = RunFolder.create(disk)
    folder.write_run(RunRecord(SCHEMA_VERSION, "interrupted"))
    with pytest.raises(OSError, match="space") as raised:
        _fill(folder)
    assert raised.value.errno == errno.ENOSPC
    run = load_run(folder.path)
    assert (run.outcome, run.damage) == ("interrupted", None)
    written = [step.step for step in run.steps]
    assert written == list(range(len(written)))
    assert len(written) > 20
    assert (folder.path / "steps.jsonl").read_bytes().endswith(b"}\n")

    with pytest.raises(OSError, match="space"):
        folder.write_run(RunRecord(SCHEMA_VERSION, "ok", argv=["x" * 10_000]))
    assert load_run(folder.path).outcome == "interrupted"
    assert sorted(file.name for file in folder.path.iterdir()) == ["run.json", "steps.jsonl"]

    ballast.unlink()
    folder.append_steps([StepRecord(step=len(written))])
    folder.write_run(RunRecord(SCHEMA_VERSION, "ok"))
    run = load_run(folder.path)
    assert (run.outcome, run.damage, len(run.steps)) == ("ok", None, len(written) + 1)
