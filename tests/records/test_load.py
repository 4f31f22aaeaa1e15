"""Reading results that are torn, damaged, killed, foreign or endless: a line says so, and the rest is kept."""

from __future__ import annotations

import os
import subprocess
import tracemalloc

import pytest
from refusals import usage_error
from tables import cases

from lmbench.records.load import find_runs, load_run
from lmbench.records.measured import RunError
from lmbench.records.process import boot_id, is_running, process_identity, process_start_s
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.store import RunFolder

MIB = 2**20


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder.create(tmp_path, run_id="run")
    folder.write_run(RunRecord(SCHEMA_VERSION, "ok"))
    folder.append_steps([StepRecord(step=0), StepRecord(step=1)])
    return folder


def _append(folder, data):
    with (folder.path / "steps.jsonl").open("ab") as file:
        file.write(data)
    run = load_run(folder.path)
    return [step.step for step in run.steps], run.damage


@cases(
    r"""
- [data, steps, damage]
# A last line that is torn, that is torn within a letter, that lacks its newline; a torn line in the middle; other data.
- ['{"step": 2, "loss', [0, 1], null]
- ["{\"step\": 2, \"note\": \"\xc3", [0, 1], null]
- ['{"step": 2}', [0, 1, 2], null]
- ["{\"step\": 2,\n{\"step\": 3}\n", [0, 1, 3], "unreadable lines: 1, the first is line 3"]
- ["\0\n\xff\n{\"step\": 3}\n", [0, 1, 3], "unreadable lines: 2, the first is line 3"]
""",
    ("[" * 100_000 + "\n", [0, 1], "unreadable lines: 1, the first is line 3"),
)
def test_a_torn_last_line_is_ignored_and_any_other_unreadable_line_is_damage(folder, data, steps, damage):
    assert _append(folder, data.encode("latin-1")) == (steps, damage and f"steps.jsonl: {damage}")


@cases(
    "make | damage",
    (lambda path: None, "run.json is missing"),
    (os.mkfifo, "run.json is not read: it is no regular file"),
    (lambda path: path.symlink_to("/dev/zero"), "run.json is not read: 'run.json' leads out of its folder"),
    (lambda path: path.write_bytes(b" " * 9 * MIB), "run.json is not read: it holds more than 8 MiB"),
    (lambda path: path.write_bytes(b"\xff\xfe{}"), "run.json is damaged: it is no JSON"),
)
def test_a_run_whose_run_json_cannot_be_read_is_damaged_and_keeps_its_steps(folder, make, damage):
    (folder.path / "run.json").unlink()
    make(folder.path / "run.json")
    assert find_runs([folder.path]) == [folder.path]
    run = load_run(folder.path)
    assert (run.outcome, len(run.steps)) == ("damaged", 2)
    assert run.damage.startswith(damage)


def test_other_folders_and_results_of_another_version_are_refused(folder, tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with usage_error("is no lmbench result"):
            load_run(path)
    (tmp_path / "run.json").write_text('{"name": "of somebody else"}')
    with usage_error("no schema_version"):
        load_run(tmp_path)
    folder.write_run(RunRecord(99, "ok"))
    with usage_error(rf"schema version 99, this lmbench reads {SCHEMA_VERSION};"):
        load_run(folder.path)


@cases("""
- [changes, outcome]
- [{}, running]
- [{boot_id: 00000000-0000-0000-0000-000000000000}, killed]
# A process id that was used again, none, and one without a process.
- [{process_start_s: 0.01}, killed]
- [{pid: null}, killed]
- [{pid: 4194305}, killed]
""")
def test_a_run_is_running_while_its_process_lives_and_killed_once_it_is_gone(folder, changes, outcome):
    pid, boot, start_s = process_identity()
    identity = {"pid": pid, "boot_id": boot, "process_start_s": start_s, **changes}
    folder.write_run(RunRecord(SCHEMA_VERSION, "running", **identity))
    assert load_run(folder.path).outcome == outcome


def test_a_process_that_ended_but_was_not_waited_for_is_gone():
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    process = (child.pid, boot_id(), process_start_s(child.pid))
    assert is_running(*process)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(*process)
    child.wait()


def test_runs_are_found_at_any_depth_once_and_sorted(tmp_path):
    paths = [tmp_path / name for name in ("b", "a", "sweep/c")]
    for path in paths:
        RunFolder.create(path.parent, run_id=path.name).write_run(RunRecord(SCHEMA_VERSION, "ok"))
    # A folder inside a run's folder is not a run; a link to a parent folder is not followed.
    (tmp_path / "a" / "wandb").mkdir()
    (tmp_path / "a" / "wandb" / "run.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "sweep" / "again").symlink_to(tmp_path)
    assert find_runs([tmp_path, tmp_path / "a" / "run.json", tmp_path / "sweep" / ".."]) == sorted(paths)
    assert load_run(tmp_path / "a" / "run.json").path == tmp_path / "a"


def test_paths_without_results_are_refused(tmp_path):
    for path in (tmp_path / "absent", "a" * 5000, "a\0b"):
        with usage_error("does not exist"):
            find_runs([path])
    with usage_error("holds no lmbench result"):
        find_runs([tmp_path])


def test_steps_without_end_are_read_in_bounded_memory(folder):
    steps = folder.path / "steps.jsonl"
    # Once with empty lines, and once with a long last line of zeros, in a sparse file.
    for start, size, count, damage in (
        (b"\n" * (MIB // 2) + b'{"step": 7}\n', None, 1, None),
        (b'{"step": 1}\n', 16 * MIB, 1, "steps.jsonl: unreadable lines: 1, the first is line 2"),
    ):
        steps.write_bytes(start)
        os.truncate(steps, size or len(start))
        tracemalloc.start()
        run = load_run(folder.path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (run.damage, len(run.steps)) == (damage, count)
        assert peak_bytes < 8 * MIB


def test_the_end_of_a_run_names_the_type_of_an_error_whose_message_is_the_key_alone():
    assert RunError("KeyError", "'input_id'", "forward").ending("error") == "error in forward: KeyError: 'input_id'"
    assert RunError("ValueError", "no tokens", "setup").ending("error") == "error in setup: no tokens"
