"""The line that shows the progress of a run."""

from __future__ import annotations

import re
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

from tables import cases
from test_task_progress import Terminal

from lmbench import progress
from lmbench.callbacks.progress_line import ProgressLine
from lmbench.instruments.window import ProbeKind, Schedule
from lmbench.records.run import Compile, RunRecord
from lmbench.records.vocabulary import Stage


def in_a_run(stream, stage=Stage.WARMUP):
    """A progress line in a run at the given stage."""
    line = ProgressLine(stream)
    line.undo = ExitStack()
    line.session = SimpleNamespace(
        schedule=Schedule(warmup_steps=5, steps=20, min_window_s=3.0, probe_steps=5),
        run=RunRecord(1, "running", compile=Compile(is_enabled=True)),
        steps_done=0,
        stage=stage,
        window_steps=0,
        window_elapsed_s=0.0,
        probe_kind=ProbeKind.MEMORY,
        probes_left=[ProbeKind.MEMORY, ProbeKind.SYNC, ProbeKind.TRAINING],
    )
    return line


def test_the_wait_for_a_first_step_that_compiles_is_told_and_ends_with_the_window(monkeypatch):
    monkeypatch.setattr(progress, "_LIVE_EVERY_S", 0.01)
    line = in_a_run(terminal := Terminal())
    line.run_started()
    deadline_s = time.monotonic() + 30
    while not terminal.getvalue() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert re.search(r"1/4 warm-up: compiling, [\d.]+ s so far", terminal.getvalue())
    line.before_window()
    assert not any(thread.name == "lmbench-progress" for thread in threading.enumerate())


@cases(
    """
- [stage, changes, text]
- [warmup, {steps_done: 2}, "1/4 warm-up: step 2 of 5, 0.0 s so far, 4.8 s left"]
- [warmup, {steps_done: 27}, "1/4 warm-up: step 27, 0.0 s so far, 4.5 s left"]
# The time left is the rest of the window's 3 s, and 15 probe steps of 0.1 s.
- [window, {steps_done: 17, window_steps: 12, window_elapsed_s: 1.2},
   "2/4 window: step 12 of 30, 0.0 s so far, 3.3 s left, 100 ms/step"]
- [probe, {steps_done: 56}, "3/4 probe: memory, 0.0 s so far, 0.4 s left"]
# Between two stages the line stays.
- [done, {steps_done: 56}, ""]
""",
    ("window", {"schedule": Schedule(), "window_steps": 7}, "2/4 window: step 7, 0.0 s so far, 100 ms/step"),
    (
        "probe",
        {"steps_done": 56, "probe_kind": ProbeKind.DTYPES, "probes_left": []},
        "3/4 probe: dtypes, 0.0 s so far, 0.1 s left",
    ),
)
def test_every_stage_says_what_is_done_and_what_is_left_in_that_order(monkeypatch, stage, changes, text):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    line = in_a_run(terminal := Terminal(), Stage(stage))
    line.run_started()
    line.before_window()
    vars(line.session).update(changes)
    line._step_s = 0.1
    line._show()
    assert terminal.getvalue().removeprefix("\r") == text
