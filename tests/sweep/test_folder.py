"""A sweep's folder that somebody else made: no process is signalled and no file written that is not this sweep's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from simulated_cells import SimulatedServers, records, sweep

from lmbench.errors import UsageError
from lmbench.records.process import boot_id, process_start_s
from lmbench.sweep.folder import MARK, SweepFolder

ONE = {"matrix": {"data.batch_size": [1]}, "repeats": 1}


def _ok() -> SimulatedServers:
    return SimulatedServers(lambda name: "ok")


def _begun(tmp_path: Path) -> Path:
    """The folder of the only run of a sweep that was begun here."""
    sweep(tmp_path, _ok(), ONE)
    (name,) = records(tmp_path)
    return tmp_path / "sim" / "runs" / name


def _says_running(run: Path, pid: int, start_s: float | None) -> None:
    record = {"schema_version": 1, "outcome": "running", "pid": pid, "process_start_s": start_s, "boot_id": boot_id()}
    (run / "run.json").write_text(json.dumps(record))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("knows_start", [False, True])
def test_a_foreign_process_that_a_record_names_is_left_alone(
    knows_start: bool, tmp_path: Path, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    run = _begun(tmp_path)
    _says_running(run, sleeper.pid, process_start_s(sleeper.pid) if knows_start else None)
    again = _ok()
    sweep(tmp_path, again, ONE)
    assert sleeper.poll() is None
    assert again.started == [run.name]
    told = "no sweep of this folder started that, and it is left alone"
    assert (told in capsys.readouterr().err) is knows_start


@pytest.mark.parametrize("pid", [-1, 0, 1, -(10**9), 2**31, 2**62])
def test_no_process_id_of_a_record_is_signalled_as_it_stands(
    pid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _begun(tmp_path)
    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, lambda pid, signum: pytest.fail(f"{pid} was signalled"))
    for start_s in (None, 0.0, process_start_s(1)):
        _says_running(run, pid, start_s)
        again = _ok()
        sweep(tmp_path, again, ONE)
        assert again.started == [run.name]


def test_a_process_of_another_sweeps_folder_is_left_alone(tmp_path: Path) -> None:
    run = _begun(tmp_path)
    with subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: str(tmp_path / "other")}) as other:
        _says_running(run, other.pid, process_start_s(other.pid))
        sweep(tmp_path, _ok(), ONE)
        assert other.poll() is None
        other.kill()


def test_a_process_that_outlived_its_own_sweep_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _begun(tmp_path)
    mark = SweepFolder(tmp_path / "sim").mark
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **mark}) as own:
        _says_running(run, own.pid, process_start_s(own.pid))
        sweep(tmp_path, _ok(), ONE)
        assert own.wait(10) == -signal.SIGKILL
    assert f"was still running (process {own.pid}); it was ended" in capsys.readouterr().err


def _go_on(tmp_path: Path) -> None:
    with suppress(UsageError):
        sweep(tmp_path, _ok(), ONE)
    SweepFolder(tmp_path / "sim").write_cells("table")


def _go_on_with(tmp_path: Path, name: str, put: Callable[[Path], None]) -> None:
    """Go on with a sweep one of whose files is something else."""
    run = _begun(tmp_path)
    file = run.parent.parent / name
    file.unlink(missing_ok=True)
    put(file)
    (run / "run.json").unlink()
    _go_on(tmp_path)


@pytest.mark.parametrize("name", [".lock", "attempts.txt", "sweep.json", "base.yaml", "cells.csv"])
def test_nothing_is_written_or_cut_off_through_a_link(name: str, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("precious")
    _go_on_with(tmp_path, name, lambda file: file.symlink_to(foreign))
    assert foreign.read_text() == "precious"


@pytest.mark.parametrize("name", [".lock", "attempts.txt", "sweep.json", "cells.csv"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    _go_on_with(tmp_path, name, os.mkfifo)


def test_runs_behind_a_link_are_neither_taken_nor_removed(tmp_path: Path) -> None:
    run = _begun(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    run.rename(elsewhere)
    (elsewhere / "run.json").write_text("{")
    run.symlink_to(elsewhere)
    again = _ok()
    sweep(tmp_path, again, ONE)
    assert again.started == [run.name]
    assert (elsewhere / "run.json").read_text() == "{"
    assert not run.is_symlink()
    run.parent.rename(tmp_path / "runs elsewhere")
    run.parent.symlink_to(tmp_path / "runs elsewhere")
    with pytest.raises(UsageError, match="is a link, and runs are not written through it"):
        sweep(tmp_path, _ok(), ONE)


def test_compiled_code_that_lies_there_is_removed_before_anything_runs(tmp_path: Path) -> None:
    run = _begun(tmp_path)
    planted = run.parent.parent / "compile_cache" / "launcher.so"
    planted.parent.mkdir()
    planted.touch()
    (run / "run.json").unlink()
    seen = []
    sweep(tmp_path, SimulatedServers(lambda name: "ok" if seen.append(planted.exists()) is None else ""), ONE)
    assert seen == [False]
