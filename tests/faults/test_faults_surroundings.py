"""What happens around a run: other runs, clocks, outputs that go away, a results folder that is taken away."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fit_process import SMALL, SMOKE, start_fit
from warm_server import warm_server

import lmbench
from lmbench.callbacks import run_recorder
from lmbench.cli import main
from lmbench.records.load import load_run

QUICK = ["--measure.warmup_steps", "2", "--measure.steps", "6", "--measure.probe_steps", "2"]
RUN = ["--config", SMOKE, "--trainer.logger", "false", "--measure.min_window_s", "0", *SMALL, *QUICK]


def test_runs_that_start_at_the_same_moment_get_folders_of_their_own(tmp_path):
    fits = [start_fit(tmp_path, *QUICK) for _ in range(4)]
    assert [fit.wait() for fit in fits] == [0] * 4
    runs = fits[0].results
    assert [(run.outcome, len(run.steps)) for run in runs] == [("ok", 8)] * 4
    assert len({run.record.pid for run in runs}) == 4


def test_a_clock_that_jumps_back_changes_no_duration(tmp_path, monkeypatch):
    class Jumping(datetime):
        times = iter(datetime(2026, 1, 1, tzinfo=UTC) - timedelta(hours=hours) for hours in range(100))

        @classmethod
        def now(cls, tz=None):
            return next(cls.times)

    monkeypatch.setattr(run_recorder, "datetime", Jumping)
    assert main(["fit", *RUN, "--measure.results_dir", str(tmp_path)]) == 0
    run = load_run(next(tmp_path.iterdir())).record
    assert run.ended_at < run.started_at
    assert 0 < run.window.wall_s < 60
    assert all(guard.name != "window_identity" or guard.status == "pass" for guard in run.guards)


def test_no_duration_is_taken_from_the_wall_clock():
    root = Path(lmbench.__file__).parent
    sources = [*root.rglob("*.py"), *Path(run_recorder.__file__).parent.glob("*.py")]
    wall = re.compile(r"\btime\.time(_ns)?\(|\btime\.clock_gettime\(time\.CLOCK_REALTIME")
    assert [str(path) for path in sources if wall.search(path.read_text())] == []


def test_a_results_folder_that_is_taken_away_does_not_end_the_measurement(tmp_path):
    fit = start_fit(tmp_path, "--measure.steps", "100", "--measure.probe_steps", "0")
    fit.wait_until(lambda: list(tmp_path.glob("results/*/steps.jsonl")))
    shutil.rmtree(tmp_path / "results")
    assert fit.wait() == 1
    assert "100 steps after 3 of warm-up" in fit.out
    assert "error in recording" in fit.out
    assert fit.err.count("\n") == 1
    assert "No such file or directory; measuring goes on" in fit.err


def lmbench_fit(tmp_path, *words, out, **more):
    """Start a fit that says its errors to a file `err`, and prints to the file descriptor `out`."""
    with (tmp_path / "err").open("wb") as err:
        more.setdefault("streams", (None, out, err.fileno()))
        return warm_server().start("fit", *RUN, "--measure.results_dir", str(tmp_path / "results"), *words, **more)


def outcome(tmp_path):
    (folder,) = (tmp_path / "results").iterdir()
    run = load_run(folder)
    return run.outcome, len(run.steps), run.record.exit_code


@pytest.mark.parametrize("words", [[], ["--json"], ["--quiet"]])
def test_a_reader_that_goes_away_neither_ends_the_run_nor_is_complained_about(words, tmp_path):
    read, write = os.pipe()
    os.close(read)
    fit = lmbench_fit(tmp_path, *words, out=write)
    os.close(write)
    assert (fit.wait(), (tmp_path / "err").read_text()) == (0, "")
    assert outcome(tmp_path) == ("ok", 8, 0)


def test_an_output_that_is_full_is_told_of_in_one_line(tmp_path):
    with Path("/dev/full").open("wb") as full:
        fit = lmbench_fit(tmp_path, out=full.fileno())
    code, err = fit.wait(), (tmp_path / "err").read_text()
    assert (code, err.count("\n")) == (1, 1)
    assert "the result could not be printed" in err
    assert outcome(tmp_path) == ("ok", 8, 0)


def test_a_terminal_that_goes_away_does_not_end_a_run_that_ignores_it(tmp_path):
    terminal, stream = pty.openpty()
    fit = lmbench_fit(tmp_path, "--measure.steps", "60", out=stream, streams=(stream,) * 3, has_own_session=True)
    os.close(stream)
    while fit.poll() is None and not list(tmp_path.glob("results/*/steps.jsonl")):
        time.sleep(0.01)
    os.close(terminal)
    fit.wait()
    assert outcome(tmp_path) == ("ok", 62, 0)


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_a_new_interpreter_measures_too(command, tmp_path):
    words = [sys.executable, "-m", "lmbench", command, *RUN, "--measure.results_dir", str(tmp_path / "results")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tokens/s" in done.stdout
    assert outcome(tmp_path) == ("ok", 8, 0)
