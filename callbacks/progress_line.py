"""Where a run stands, in a line that costs the window nothing: live on a terminal, now and then in a log file."""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from typing import TextIO

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

    def run_ended(self, exception: BaseException | None) -> None:
        self._stop_waiting()
        if self._is_live:
            self._show("")

    # what there is to say

    def _wait(self) -> None:
        """In a thread: until the window opens, how long it has been coming."""
        every_s = _LIVE_EVERY_S if self._is_live else LOG_EVERY_S
        while not self._window_opens.wait(every_s):
            self._tell(*self._before_window())

    def _before_window(self) -> list[str]:
        session, so_far = self.session, f"{duration(time.monotonic() - self._began_s)} so far"
        if not session.steps_done or self._pace_s is None:
            return [f"{'compiling' if session.run.compile.is_enabled else 'first step'}, {so_far}"]
        warmup = session.schedule.warmup_steps
        left_s = max(0, warmup - session.steps_done) * self._pace_s
        return [f"warm-up {session.steps_done}/{warmup}, {so_far}", *self._pace_and_left(self._pace_s, left_s)]

    def _in_window(self, records: list[StepRecord]) -> list[str]:
        session, steps = self.session, self.session.schedule.steps
        step_s = [record.step_s for record in records if record.step_s is not None]
        tokens, taken_s = sum(record.tokens or 0 for record in records), math.fsum(step_s)
        on_gpu = session.device.type == "cuda"
        held = torch.cuda.memory_reserved(session.device) if on_gpu else peak_rss_bytes()
        # The time left by all of the window: one second's steps say little of those to come.
        elapsed_s, done = session.window_elapsed_s, session.window_steps
        pace, *left = self._pace_and_left(taken_s / max(1, len(step_s)), 0.0, done, elapsed_s, elapsed_s / done)
        rate = [f"{tokens / taken_s:,.0f} tokens/s"] if tokens and taken_s else []
        return [f"step {done}" + (f"/{steps}" if steps else ""), pace, *rate, gib(held), *(left if steps else [])]

    def _pace_and_left(
        self, step_s: float, before_s: float, done: int = 0, elapsed_s: float = 0.0, window_step_s: float | None = None
    ) -> tuple[str, str]:
        """The time of a step, and the time up to the last probe step, where probe steps take as long as others.

        Args:
            step_s: of the latest steps.
            before_s: until the window opens.
            done: steps of the window that are over, in `elapsed_s`.
            window_step_s: the window's time of a step; None takes `step_s`.
        """
        schedule, pace_s = self.session.schedule, step_s if window_step_s is None else window_step_s
        window_s = max(((schedule.steps or 0) - done) * pace_s, schedule.min_window_s - elapsed_s, 0.0)
        left_s = before_s + window_s + len(schedule.probe_plan()) * pace_s
        pace = f"{step_s * 1e3:.4g} ms/step" if step_s < 10 else f"{step_s:.3g} s/step"
        return pace, f"{duration(left_s)} left"

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
