"""A sweep's folder that somebody else made: no process is signalled and no file written that is not this sweep's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from simulated_cells import SimulatedServers, records, sweep

from lmbench.errors import UsageError
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
        (None, True, "no sweep of this folder started that, and it is left alone"),
        ("other", True, "no sweep of this folder started that, and it is left alone"),
        ("sim", True, "it was ended"),
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
    assert (f"was still running (process {sleeper.pid}); {told}" in err) == (told is not None)


@pytest.mark.parametrize("pid", [-1, 0, 1, -(10**9), 2**31, 2**62])
def test_no_process_id_of_a_record_is_signalled_as_it_stands(
    pid: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, lambda pid, signum: pytest.fail(f"{pid} was signalled"))
    for start_s in (None, 0.0, process_start_s(1)):
        says_running(run, pid, start_s)
        assert go_on(tmp_path) == [run.name]


@pytest.mark.parametrize("name", [".lock", "attempts.txt", "sweep.json", "base.yaml", "cells.csv"])
@pytest.mark.parametrize("is_pipe", [False, True])
def test_nothing_is_written_through_a_link_and_a_pipe_is_not_waited_for(
    is_pipe: bool, name: str, run: Path, tmp_path: Path
) -> None:
    foreign, file = tmp_path / "foreign", run.parents[1] / name
    foreign.write_text("precious")
    file.unlink(missing_ok=True)
    if is_pipe:
        os.mkfifo(file)
    else:
        file.symlink_to(foreign)
    (run / "run.json").unlink()
    with suppress(UsageError):
        go_on(tmp_path)
    SweepFolder(tmp_path / "sim").write_cells("table")
    assert foreign.read_text() == "precious"


def test_runs_behind_a_link_are_neither_taken_nor_removed(run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    run.rename(elsewhere)
    (elsewhere / "run.json").write_text("{")
    run.symlink_to(elsewhere)
    assert go_on(tmp_path) == [run.name]
    assert (elsewhere / "run.json").read_text() == "{"
    assert not run.is_symlink()
    run.parent.rename(tmp_path / "runs elsewhere")
    run.parent.symlink_to(tmp_path / "runs elsewhere")
    with pytest.raises(UsageError, match="is a link, and runs are not written through it"):
        go_on(tmp_path)


def test_compiled_code_that_lies_there_is_removed_before_anything_runs(run: Path, tmp_path: Path) -> None:
    planted = run.parents[1] / "compile_cache" / "launcher.so"
    planted.parent.mkdir()
    planted.touch()
    (run / "run.json").unlink()
    sweep(tmp_path, SimulatedServers(lambda name: "error" if planted.exists() else "ok"), ONE)
    assert [row.outcome for row in records(tmp_path).values()] == ["ok"]
