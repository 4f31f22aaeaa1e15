"""Shows the progress of a run in one line: live on a terminal, now and then in a log file."""

from __future__ import annotations

import time
from contextlib import ExitStack
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
    """Shows the step number, the time left and the time of a step on standard error.

    In the window the line changes only when the timer hands over records, about once a second. That moment is excluded
    from the steps and the window (`excluded_s`). Before the window a thread shows the elapsed time, since a first step
    may compile for minutes. The thread ends when the window opens, unless warm-up steps take 5 s or more.

    Args:
        stream: where the line is written; None for standard error.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._line, self._thread = StatusLine(stream), ExitStack()

    def run_started(self) -> None:
        self._began_s = self._step_began_s = time.monotonic()
        self._warmup_step_s: float | None = None
        self._thread.close()
        self._thread.enter_context(refreshing(self._line, self._show_elapsed))

    def before_window(self) -> None:
        if (self._warmup_step_s or 0.0) < _LONG_STEP_S:
            self._thread.close()

    def steps_recorded(self, records: list[StepRecord]) -> None:
        session, schedule = self.session, self.session.schedule
        self._warmup_step_s, self._step_began_s = records[-1].step_s, time.monotonic()
        steps = session.window_steps
        if session.stage is not Stage.WINDOW or not steps:
            return
        # Estimate the time left from the whole window: the steps of one second vary too much.
        elapsed_s, recorded_s = session.window_elapsed_s, sum(record.step_s or 0.0 for record in records)
        status, step_s = f"step {steps}", elapsed_s / steps
        if schedule.steps:
            window_left_s = max((schedule.steps - steps) * step_s, schedule.min_window_s - elapsed_s, 0.0)
            # A probe step takes as long as a step of the window.
            probes_s = len(schedule.probe_plan()) * step_s
            status += f"/{schedule.steps}, {duration(window_left_s + probes_s)} left"
        self._line.show(f"{status}, {recorded_s / len(records) * 1e3:.4g} ms/step")

    def probe_begins(self, kind: ProbeKind) -> None:
        self._line.show(f"probe steps: {kind.value}")

    def run_ended(self, exception: BaseException | None) -> None:
        self._thread.close()
        self._line.clear()

    def _show_elapsed(self) -> None:
        """Show, from the thread, how long the warm-up takes so far, or in the window the running step."""
        session, warmup = self.session, self.session.schedule.warmup_steps
        so_far = f"{duration(time.monotonic() - self._began_s)} so far"
        if session.stage is Stage.WINDOW:
            step_s = time.monotonic() - self._step_began_s
            self._line.show(f"step {session.window_steps + 1}, {duration(step_s)} so far")
        elif session.steps_done and self._warmup_step_s is not None:
            self._line.show(f"warm-up {session.steps_done}/{warmup}, {so_far}")
        else:
            self._line.show(f"{'compiling' if session.run.compile.is_enabled else 'first step'}, {so_far}")
