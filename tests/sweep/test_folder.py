"""A sweep's folder that somebody else made: no process is signalled that is not this sweep's, no code of it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from simulated_cells import SimulatedServers, records, sweep

from lmbench.records.process import boot_id, process_start_s
from lmbench.sweep.folder import MARK, SweepFolder

ONE = {"matrix": {"data.batch_size": [1]}, "repeats": 1}


def go_on(tmp_path: Path) -> list[str]:
    """Begin a sweep of one run here, or go on with it; returns the runs that were measured."""
    servers = SimulatedServers(lambda name: "ok")
    sweep(tmp_path, servers, ONE)
    return servers.started


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of the only run of a sweep that was begun here."""
    return tmp_path / "sim" / "runs" / go_on(tmp_path)[0]


def says_running(run: Path, pid: int, start_s: float | None) -> None:
    record = {"schema_version": 1, "outcome": "running", "pid": pid, "process_start_s": start_s, "boot_id": boot_id()}
    (run / "run.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("mark", "knows_start", "told"),
    [
        (None, False, None),
        (None, True, "was not started by this folder's sweep, and goes on"),
        ("other", True, "was not started by this folder's sweep, and goes on"),
        ("sim", True, "was ended"),
    ],
)
def test_a_process_that_a_record_names_is_ended_only_if_a_sweep_of_this_folder_started_it(
    mark: str | None, knows_start: bool, told: str | None, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {} if mark is None else {MARK: SweepFolder(tmp_path / mark).mark[MARK]}
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **variables}) as sleeper:
        says_running(run, sleeper.pid, process_start_s(sleeper.pid) if knows_start else None)
        assert go_on(tmp_path) == [run.name]
        assert (sleeper.poll() is None) == (mark != "sim")
        sleeper.kill()
    assert sleeper.returncode == -signal.SIGKILL
    err = capsys.readouterr().err
    assert (f"was still running: process {sleeper.pid} {told}" in err) == (told is not None)


def test_compiled_code_that_lies_there_is_removed_before_anything_runs(run: Path, tmp_path: Path) -> None:
    planted = run.parents[1] / "compile_cache" / "launcher.so"
    planted.parent.mkdir()
    planted.touch()
    (run / "run.json").unlink()
    sweep(tmp_path, SimulatedServers(lambda name: "error" if planted.exists() else "ok"), ONE)
    assert [row.outcome for row in records(tmp_path).values()] == ["ok"]
