"""Shows the progress of a run in one line: live on a terminal, now and then in a log file."""

from __future__ import annotations

import time
from typing import TextIO

from lmbench.callbacks.observer import Observer
from lmbench.instruments.window import ProbeKind
from lmbench.progress import StatusLine, refreshing
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import Stage
from lmbench.report.units import duration

#: In steps of this length or more a thread that wakes up once a second takes a negligible share of the time.
_LONG_STEP_S = 5.0


class ProgressLine(Observer):
    """Shows on standard error which stage of four a run is in, what of it is done, and the time left of the run.

    In the window the line changes only when the timer hands over records, about once a second. That moment is excluded
    from the steps and the window (`excluded_s`). Before the window a thread shows the elapsed time, since a first step
    may compile for minutes. The thread ends when the window opens, unless warm-up steps take 5 s or more.

    Args:
        stream: where the line is written; None for standard error.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._line = StatusLine(stream)

    def run_started(self) -> None:
        self._began_s = time.monotonic()
        self._step_s: float | None = None
        self.undo.enter_context(refreshing(self._line, self._show))

    def before_window(self) -> None:
        if (self._step_s or 0.0) < _LONG_STEP_S:
            self.undo.close()

    def steps_recorded(self, records: list[StepRecord]) -> None:
        session = self.session
        # Estimate from the whole window: the steps of one second vary too much. The first step may have compiled.
        if session.stage is Stage.WINDOW and session.window_steps:
            self._step_s = session.window_elapsed_s / session.window_steps
        elif session.steps_done > 1:
            self._step_s = records[-1].step_s
        if session.stage is Stage.WINDOW:
            self._show()

    def probe_begins(self, kind: ProbeKind) -> None:
        self._show()

    def run_closing(self, exception: BaseException | None) -> None:
        self.undo.close()
        self._line.show("4/4 closing")

    def run_ended(self, exception: BaseException | None) -> None:
        self._line.clear()

    def _show(self) -> None:
        session, schedule, step_s = self.session, self.session.schedule, self._step_s
        if session.stage is Stage.DONE:
            return
        warmup_left = max(schedule.warmup_steps - session.steps_done, 0)
        done, window_left, plan = session.window_steps, schedule.steps, schedule.probe_plan()
        if window_left is not None and step_s:
            elapsed_s = session.window_elapsed_s if session.stage is Stage.WINDOW else 0.0
            window_left = max(window_left - done, round((schedule.min_window_s - elapsed_s) / step_s), 0)
        if session.stage is Stage.PROBE:
            kind = session.probe_kind or ProbeKind.SETTLE
            window_left, plan = 0, [kind, *session.probes_left]
            text = f"3/4 probe: {kind.value}"
        elif session.stage is Stage.WINDOW:
            text = f"2/4 window: step {done}" + (f" of {done + window_left}" if window_left is not None else "")
        elif session.steps_done == 0:
            text = f"1/4 warm-up: {'compiling' if session.run.compile.is_enabled else 'first step'}"
        else:
            # Several ranks warm up for longer, until their pace is steady.
            text = f"1/4 warm-up: step {session.steps_done}" + (f" of {schedule.warmup_steps}" if warmup_left else "")
        words = [text, f"{duration(time.monotonic() - self._began_s)} so far"]
        if window_left is not None and step_s:
            words.append(f"{duration((warmup_left + window_left + len(plan)) * step_s)} left")
        if session.stage is Stage.WINDOW and step_s:
            words.append(f"{step_s * 1e3:.4g} ms/step")
        self._line.show(", ".join(words))
