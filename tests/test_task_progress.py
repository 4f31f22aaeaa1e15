"""Progress of a task, on a terminal and in a log."""

from __future__ import annotations

import io
import re
import threading
from functools import partial

import pytest

from lmbench import progress
from lmbench.progress import StatusLine
from lmbench.python_process import run_python

CHILD = "import sys, time; print('lmbench: batch 7', file=sys.stderr, flush=True); time.sleep(0.5); print('done')"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "_LIVE_EVERY_S", 0.02)
    # During a test, standard error belongs to pytest.
    monkeypatch.setattr(progress, "StatusLine", partial(StatusLine, stream := Terminal()))
    return stream


def test_a_live_line_shows_part_child_output_and_time_left_and_is_wiped_at_the_end(terminal):
    with progress.progress("counting", 3) as task:
        task.begin("one")
        assert run_python("-c", CHILD, heard=task.note) == "done\n"
        task.begin("two")
        task.keep("one took long")
    text = terminal.getvalue()
    assert re.search(r"\rcounting: 1 of 3 one, batch 7, [\d.]+ s so far", text)
    assert re.search(r"\rcounting: 2 of 3 two, [\d.]+ s so far, about [\d.]+ s left", text)
    assert "lmbench: counting: one took long\n" in text
    assert not text.rpartition("\r")[2].startswith("counting")
    assert not any(thread.name == "lmbench-progress" for thread in threading.enumerate())


def test_parts_that_ended_earlier_are_counted_and_take_no_time(terminal):
    with progress.progress("counting", 4) as task:
        task.skip()
        task.begin("two")
        task.begin("three")
    assert re.findall(r"\rcounting: (\d of \d \w+)", terminal.getvalue())[:2] == ["2 of 4 two", "3 of 4 three"]


def test_a_log_gets_a_line_after_5_s_and_then_at_growing_intervals(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    line = StatusLine(log := io.StringIO())
    for second in range(600):
        now_s[0] = float(second)
        line.show(f"at {second}")
    assert [int(words.split()[-1]) for words in log.getvalue().splitlines()[:6]] == [5, 15, 35, 75, 135, 195]


def test_a_closed_stream_raises_nothing():
    stream = Terminal()
    line = StatusLine(stream)
    stream.close()
    line.keep("lost")
    line.show("lost as well")


def test_a_live_line_fits_a_narrow_terminal_and_is_overwritten_and_wiped(monkeypatch):
    monkeypatch.setenv("COLUMNS", "24")
    monkeypatch.setenv("TERM", "xterm")
    line = progress.StatusLine(terminal := Terminal())
    line.show("step 12/20, 2.8 s left, 200 ms/step")
    line.show("short")
    line.clear()
    assert terminal.getvalue().split("\r")[1:] == ["step 12/20, 2.8 s left,", "short" + " " * 18, " " * 5, ""]
