"""The line that shows the progress of a run."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

from test_task_progress import Terminal

from lmbench import progress
from lmbench.callbacks.progress_line import ProgressLine
from lmbench.instruments.window import Schedule
from lmbench.records.run import Compile, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import Stage


def in_a_run(stream, stage=Stage.WARMUP, window_steps=0, window_elapsed_s=0.0):
    """A progress line in a run at the given stage."""
    line = ProgressLine(stream)
    line._session = SimpleNamespace(
        schedule=Schedule(warmup_steps=5, steps=20, min_window_s=3.0, probe_steps=5),
        run=RunRecord(1, "running", compile=Compile(is_enabled=True)),
        steps_done=window_steps,
        stage=stage,
        window_steps=window_steps,
        window_elapsed_s=window_elapsed_s,
    )
    return line


# The time left is the rest of the window's 3 s, and 10 probe steps of 0.1 s as in the window.
WINDOW = "step 12/20, 2.8 s left, 200 ms/step"


def test_a_dumb_terminal_gets_a_line_now_and_then_that_says_all(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    line = in_a_run(log := Terminal(), Stage.WINDOW, window_steps=12, window_elapsed_s=1.2)
    line.run_started()
    line.before_window()
    records = [StepRecord(step_s=0.1), StepRecord(step_s=0.3)]
    line.steps_recorded(records)
    assert log.getvalue() == ""
    line._line._pause_s = 0.0
    line.steps_recorded(records)
    line.run_ended(None)
    assert log.getvalue() == f"lmbench: {WINDOW}\n"


def test_the_wait_for_a_first_step_that_compiles_is_told_and_ends_with_the_window(monkeypatch):
    monkeypatch.setattr(progress, "_LIVE_EVERY_S", 0.01)
    line = in_a_run(terminal := Terminal())
    line.run_started()
    while "compiling" not in terminal.getvalue():
        time.sleep(0.01)
    assert "compiling, 0.0 s so far" in terminal.getvalue()
    line.before_window()
    assert not any(thread.name == "lmbench-progress" for thread in threading.enumerate())
