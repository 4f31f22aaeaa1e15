"""Where a run stands, in a line that costs the window nothing: live on a terminal, now and then in a log file."""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from typing import Any, TextIO

import torch

from lmbench.callbacks.observer import Observer
from lmbench.instruments.host import peak_rss_bytes
from lmbench.instruments.schedule import ProbeKind
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import Stage
from lmbench.report.units import duration, gib

#: How often the line is written where it cannot be written over itself.
LOG_EVERY_S = 10.0
_LIVE_EVERY_S = 1.0


class ProgressLine(Observer):
    """Says where a run stands: step, time, tokens per second, memory, and the time that is left.

    In the window it speaks only when the timer hands over its records, about once a second; that moment is taken out of
    the steps and the window (`excluded_s`). Before the window, where a first step may compile for minutes, a thread of
    its own says how long that has gone on; it has ended when the window opens.

    On a terminal the line is written over itself; elsewhere (a pipe, a file, a terminal that is dumb) it is a line
    every 10 s.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_on = self._stream is not None
        self._is_live = self._is_on and self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._width = 0
        self._waiting: threading.Thread | None = None
        self._window_opens = threading.Event()

    def run_started(self) -> None:
        self._began_s = self._told_s = time.monotonic()
        self._pace_s: float | None = None
        self._stop_waiting()
        self._window_opens.clear()
        self._waiting = threading.Thread(target=self._wait, name="lmbench-progress", daemon=True)
        self._waiting.start()

    def before_window(self) -> None:
        self._stop_waiting()

    def steps_recorded(self, records: list[StepRecord]) -> None:
        self._pace_s = records[-1].step_s
        if self.session.stage is Stage.WINDOW and self.session.window_steps:
            self._tell(*self._in_window(records))

    def probe_begins(self, kind: ProbeKind) -> None:
        self._tell(f"probe steps: {kind.value}")

    def run_ended(self) -> None:
        self._end()

    def run_failed(self, trainer: Any, exception: BaseException) -> None:
        self._end()

    # what there is to say

    def _wait(self) -> None:
        """In a thread: until the window opens, how long it has been coming."""
        every_s = _LIVE_EVERY_S if self._is_live else LOG_EVERY_S
        while not self._window_opens.wait(every_s):
            self._tell(*self._before_window())

    def _before_window(self) -> list[str]:
        session, so_far = self.session, f"{duration(time.monotonic() - self._began_s)} so far"
        if not session.steps_done or self._pace_s is None:
            doing = "compiling" if session.run.compile.is_enabled else "first step"
            return [f"{doing}, {so_far}"]
        warmup = session.schedule.warmup_steps
        left_s = max(0, warmup - session.steps_done) * self._pace_s + self._window_left_s(0, 0.0, self._pace_s)
        return [f"warm-up {session.steps_done}/{warmup}, {so_far}", _pace(self._pace_s), _left(left_s)]

    def _in_window(self, records: list[StepRecord]) -> list[str]:
        session, schedule = self.session, self.session.schedule
        step_s = [record.step_s for record in records if record.step_s is not None]
        pace_s = math.fsum(step_s) / len(step_s) if step_s else 0.0
        steps = f"step {session.window_steps}" + (f"/{schedule.steps}" if schedule.steps else "")
        parts = [steps, _pace(pace_s)]
        tokens = sum(record.tokens or 0 for record in records)
        if tokens and pace_s:
            parts.append(f"{tokens / math.fsum(step_s):,.0f} tokens/s")
        on_gpu = session.device.type == "cuda"
        held = torch.cuda.memory_reserved(session.device) if on_gpu else peak_rss_bytes()
        parts.append(gib(held))
        if schedule.steps is not None:
            elapsed_s = session.window_elapsed_s
            # By all of the window: one second's steps say little of those to come.
            parts.append(_left(self._window_left_s(session.window_steps, elapsed_s, elapsed_s / session.window_steps)))
        return parts

    def _window_left_s(self, steps: int, elapsed_s: float, pace_s: float) -> float:
        """Until the last probe step, where probe steps take as long as others."""
        schedule = self.session.schedule
        probes = len(schedule.probe_plan())
        return max(((schedule.steps or 0) - steps) * pace_s, schedule.min_window_s - elapsed_s, 0.0) + probes * pace_s

    # how it is said

    def _tell(self, *parts: str) -> None:
        """A line of these parts: all of them in a log file, as many as fit on a terminal."""
        if self._is_live:
            columns = shutil.get_terminal_size().columns - 1
            shown = list(parts)
            # The time that is left is the last to go.
            while len(shown) > 1 and len(", ".join(shown)) > columns:
                del shown[-2 if len(shown) > 2 else -1]
            self._show(", ".join(shown)[:columns])
        elif (now_s := time.monotonic()) - self._told_s >= LOG_EVERY_S:
            self._told_s = now_s
            self._write(", ".join(parts) + "\n")

    def _show(self, text: str) -> None:
        """Write the line over what was there."""
        self._write("\r" + text.ljust(self._width) + ("\r" if not text else ""))
        self._width = len(text)

    def _write(self, text: str) -> None:
        if not self._is_on:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The terminal is gone; the measurement goes on.
            self._is_on = False

    def _stop_waiting(self) -> None:
        self._window_opens.set()
        if self._waiting is not None:
            self._waiting.join()
            self._waiting = None

    def _end(self) -> None:
        self._stop_waiting()
        if self._is_live:
            self._show("")


def _pace(step_s: float) -> str:
    return f"{step_s * 1e3:.4g} ms/step" if step_s < 10 else f"{step_s:.3g} s/step"


def _left(seconds: float) -> str:
    return f"{duration(seconds)} left"
