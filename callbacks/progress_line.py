"""A live line on a terminal that costs the window nothing."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from lmbench.callbacks.observer import Observer
from lmbench.instruments.schedule import ProbeKind
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import Stage


class ProgressLine(Observer):
    """Says where a run stands, whenever the timer hands over its records: about once a second.

    That moment is taken out of the steps and the window (`excluded_s`), so the line needs no thread and no time of the
    measurement's. Nothing is written where standard error is no terminal.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_on = self._stream is not None and self._stream.isatty()
        self._width = 0

    def run_started(self) -> None:
        self._show(f"first step{', with compiling' if self.session.run.compile.is_enabled else ''} ...")

    def steps_recorded(self, records: list[StepRecord]) -> None:
        session, schedule = self.session, self.session.schedule
        pace = f"{(records[-1].step_s or 0.0) * 1e3:.1f} ms/step"
        if session.stage is Stage.WARMUP:
            self._show(f"warm-up {session.steps_done}/{schedule.warmup_steps}, {pace}")
        elif session.stage is Stage.WINDOW and session.window_steps:
            elapsed = min(session.window_elapsed_s, schedule.min_window_s)
            steps = f"{session.window_steps}/{schedule.steps}" if schedule.steps else f"{session.window_steps}"
            self._show(f"window {steps} steps, {elapsed:.0f}/{schedule.min_window_s:.0f} s, {pace}")

    def probe_begins(self, kind: ProbeKind) -> None:
        self._show(f"probe steps: {kind.value} ...")

    def run_ended(self) -> None:
        self._show("")

    def run_failed(self, trainer: Any, exception: BaseException) -> None:
        self._show("")

    def _show(self, text: str) -> None:
        if not self._is_on:
            return
        try:
            self._stream.write("\r" + text.ljust(self._width) + ("\r" if not text else ""))
            self._stream.flush()
        except OSError:
            # The terminal is gone; the measurement goes on.
            self._is_on = False
        self._width = len(text)
