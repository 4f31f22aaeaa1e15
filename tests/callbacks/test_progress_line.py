"""The line that tells how far a run is."""

from __future__ import annotations

import io
import re
import threading
import time
from types import SimpleNamespace

import torch

from lmbench.callbacks import progress_line
from lmbench.callbacks.progress_line import ProgressLine
from lmbench.instruments.schedule import Schedule
from lmbench.records.run import Compile, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import Stage


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_live_line_is_written_over_itself_and_wiped_at_the_end():
    terminal = Terminal()
    line = ProgressLine(terminal)
    line._show("window 3/20 steps")
    line._show("short")
    line._show("")
    seen = terminal.getvalue().split("\r")
    assert seen[1:] == ["window 3/20 steps", "short            ", "     ", ""]


def in_a_run(line, device="cpu", **places):
    """The line as it is asked in a run at some place."""
    schedule = Schedule(warmup_steps=5, steps=20, min_window_s=3.0, probe_steps=5)
    run = RunRecord(1, "running", compile=Compile(is_enabled=True))
    given = {"stage": Stage.WARMUP, "steps_done": 0, "window_steps": 0, "window_elapsed_s": 0.0} | places
    line._session = SimpleNamespace(schedule=schedule, run=run, device=torch.device(device), **given)
    return line


def test_a_log_file_gets_a_line_now_and_then_that_says_all(monkeypatch):
    log = io.StringIO()
    line = in_a_run(ProgressLine(log), stage=Stage.WINDOW, window_steps=12, window_elapsed_s=1.2)
    line.run_started()
    line.before_window()
    records = [StepRecord(step_s=0.1, tokens=2048), StepRecord(step_s=0.3, tokens=2048)]
    line.steps_recorded(records)
    assert log.getvalue() == ""
    monkeypatch.setattr(progress_line, "LOG_EVERY_S", 0.0)
    line.steps_recorded(records)
    line.run_ended(None)
    # What the 3 s of the window still want, and 10 probe steps at the window's pace of 0.1 s.
    assert re.fullmatch(r"step 12/20, 200 ms/step, 10,240 tokens/s, [0-9.]+ [MG]iB, 2.8 s left\n", log.getvalue())


def test_the_wait_for_a_first_step_that_compiles_is_told_and_ends_with_the_window(monkeypatch):
    monkeypatch.setattr(progress_line, "_LIVE_EVERY_S", 0.01)
    line = in_a_run(ProgressLine(terminal := Terminal()))
    line.run_started()
    while "compiling" not in terminal.getvalue():
        time.sleep(0.01)
    assert "compiling, 0.0 s so far" in terminal.getvalue()
    line.before_window()
    assert not any(thread.name == "lmbench-progress" for thread in threading.enumerate())


def test_a_narrow_terminal_keeps_the_step_and_the_time_that_is_left(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    line = in_a_run(ProgressLine(terminal := Terminal()), stage=Stage.WINDOW, window_steps=12, window_elapsed_s=2.4)
    line.steps_recorded([StepRecord(step_s=0.2, tokens=2048)])
    assert terminal.getvalue() == "\rstep 12/20, 3.6 s left"


def test_a_dumb_terminal_is_a_log_file(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    ProgressLine(terminal := Terminal()).run_ended(None)
    assert terminal.getvalue() == ""
