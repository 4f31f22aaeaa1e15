"""Reading results: torn, damaged, killed, foreign."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from lmbench.errors import UsageError
from lmbench.records.load import find_runs, load_run
from lmbench.records.process import boot_id, is_running, process_identity, process_start_s
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.store import RunFolder


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder.create(tmp_path, run_id="run")
    folder.write_run(RunRecord(SCHEMA_VERSION, "ok"))
    folder.append_steps([StepRecord(step=0), StepRecord(step=1)])
    return folder


def _append(folder, data):
    with (folder.path / "steps.jsonl").open("ab") as file:
        file.write(data)


@pytest.mark.parametrize("torn", [b"{", b'{"step": 2, "loss', b'{"step": 2, "note": "\xc3'])
def test_torn_last_line_is_ignored(folder, torn):
    _append(folder, torn)
    run = load_run(folder.path)
    assert run.steps == [StepRecord(step=0), StepRecord(step=1)]
    assert run.damage is None


def test_a_last_line_that_lacks_only_its_newline_counts(folder):
    _append(folder, b'{"step": 2}')
    assert len(load_run(folder.path).steps) == 3


@pytest.mark.parametrize("bad", [b'{"step": 2,\n', b"\0\0\0\n", b"[1]\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n"])
def test_an_unreadable_line_in_the_middle_is_damage_and_the_rest_is_kept(folder, bad):
    _append(folder, bad + b'{"step": 3}\n')
    run = load_run(folder.path)
    assert [step.step for step in run.steps] == [0, 1, 3]
    assert run.damage == "steps.jsonl: 1 unreadable line, the first is line 3"
    assert run.outcome == "ok"


def test_every_truncation_of_run_json_is_damage_and_never_fatal(folder):
    whole = (folder.path / "run.json").read_bytes().rstrip()
    for length in (*range(40), *range(40, len(whole), 97)):
        (folder.path / "run.json").write_bytes(whole[:length])
        run = load_run(folder.path)
        assert (run.outcome, run.record.run_id, len(run.steps)) == ("damaged", None, 2)
        assert run.damage.startswith("run.json is damaged: ")
        assert "\n" not in run.damage


def test_a_missing_run_json_beside_steps_is_damage(folder):
    (folder.path / "run.json").unlink()
    run = load_run(folder.path)
    assert (run.outcome, run.damage, len(run.steps)) == ("damaged", "run.json is missing", 2)


def test_an_unknown_outcome_is_read_as_damaged(folder):
    folder.write_run(RunRecord(SCHEMA_VERSION, "splendid"))
    assert load_run(folder.path).outcome == "damaged"


def test_another_schema_version_is_refused_naming_both(folder):
    folder.write_run(RunRecord(99, "ok"))
    with pytest.raises(UsageError, match=rf"schema version 99, this lmbench reads {SCHEMA_VERSION};"):
        load_run(folder.path)


def test_a_folder_that_is_no_result_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError, match="is no lmbench result"):
            load_run(path)
    (tmp_path / "run.json").write_text(json.dumps({"name": "somebody else's"}))
    with pytest.raises(UsageError, match="no schema_version"):
        load_run(tmp_path)


def test_the_path_of_run_json_stands_for_its_folder(folder):
    assert load_run(folder.path / "run.json").path == folder.path
    assert find_runs([folder.path / "run.json"]) == [folder.path]


def _running(folder, **changes):
    pid, boot, start_s = process_identity()
    identity = {"pid": pid, "boot_id": boot, "process_start_s": start_s, **changes}
    folder.write_run(RunRecord(SCHEMA_VERSION, "running", **identity))
    return load_run(folder.path).outcome


def test_a_run_of_a_living_process_is_running(folder):
    assert _running(folder) == "running"


@pytest.mark.parametrize(
    "changes",
    [
        {"boot_id": "00000000-0000-0000-0000-000000000000"},
        {"process_start_s": 0.01},
        {"pid": None},
        {"pid": 2**22 + 1},
    ],
    ids=["another boot", "a reused process id", "no process id", "an unused process id"],
)
def test_a_run_whose_process_is_gone_is_killed(folder, changes):
    assert _running(folder, **changes) == "killed"


def test_a_process_that_ended_but_was_not_waited_for_is_gone():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start_s = process_start_s(child.pid)
    assert start_s > process_start_s(os.getpid())
    assert is_running(child.pid, boot_id(), start_s)
    child.stdin.close()
    deadline = time.monotonic() + 10
    while is_running(child.pid, boot_id(), start_s) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child.pid, boot_id(), start_s)
    child.wait()
    assert process_start_s(child.pid) is None


def test_start_times_are_read_past_odd_program_names(tmp_path):
    program = tmp_path / "a) Z (b"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "30"])
    try:
        deadline = time.monotonic() + 10
        while "a) Z" not in (stat := open(f"/proc/{child.pid}/stat").read()) and time.monotonic() < deadline:  # noqa: PTH123, SIM115
            time.sleep(0.01)
        assert "(a) Z (b)" in stat
        assert process_start_s(child.pid) > 0
    finally:
        child.kill()
        child.wait()


def test_runs_are_found_at_any_depth_once_and_sorted(tmp_path):
    names = ["b", "a", "sweep/c"]
    paths = []
    for name in names:
        run = RunFolder.create((tmp_path / name).parent, run_id=name.rpartition("/")[2])
        run.write_run(RunRecord(SCHEMA_VERSION, "ok"))
        paths.append(run.path)
    # What a run keeps inside its own folder is not another run.
    inner = tmp_path / "a" / "wandb"
    inner.mkdir()
    (inner / "run.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    assert find_runs([tmp_path, tmp_path / "a", tmp_path / "sweep" / ".."]) == sorted(paths)


def test_paths_without_results_are_refused(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        find_runs([tmp_path / "absent"])
    with pytest.raises(UsageError, match="holds no lmbench result"):
        find_runs([tmp_path])
