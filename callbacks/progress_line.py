"""Where a run stands, in a line that costs the window nothing: live on a terminal, now and then in a log file."""

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

#: A thread that wakes up now and then is nothing beside a step of this length.
_LONG_STEP_S = 5.0


class ProgressLine(Observer):
    """Says where a run stands: step, the time that is left, the time of a step.

    In the window it speaks only when the timer hands over its records, about once a second; that moment is taken out of
    the steps and the window (`excluded_s`). Before the window, where a first step may compile for minutes, a thread of
    its own says how long that has gone on; it has ended when the window opens, unless steps are long.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._line, self._thread = StatusLine(stream), ExitStack()

    def run_started(self) -> None:
        self._began_s = self._step_began_s = time.monotonic()
        self._warmup_step_s: float | None = None
        self._thread.close()
        self._thread.enter_context(refreshing(self._line, self._tell))

    def before_window(self) -> None:
        if (self._warmup_step_s or 0.0) < _LONG_STEP_S:
            self._thread.close()

    def steps_recorded(self, records: list[StepRecord]) -> None:
        session, schedule = self.session, self.session.schedule
        self._warmup_step_s, self._step_began_s = records[-1].step_s, time.monotonic()
        steps = session.window_steps
        if session.stage is not Stage.WINDOW or not steps:
            return
        # The time left by all of the window: one second's steps say little of those to come.
        elapsed_s, taken_s = session.window_elapsed_s, sum(record.step_s or 0.0 for record in records)
        place, step_s = f"step {steps}", elapsed_s / steps
        if schedule.steps:
            # A probe step takes as long as another.
            window_s = max((schedule.steps - steps) * step_s, schedule.min_window_s - elapsed_s, 0.0)
            place += f"/{schedule.steps}, {duration(window_s + len(schedule.probe_plan()) * step_s)} left"
        self._line.show(f"{place}, {taken_s / len(records) * 1e3:.4g} ms/step")

    def probe_begins(self, kind: ProbeKind) -> None:
        self._line.show(f"probe steps: {kind.value}")

    def run_ended(self, exception: BaseException | None) -> None:
        self._thread.close()
        self._line.clear()

    def _tell(self) -> None:
        """In the thread: until the window opens how long it has been coming, in it how long a step has taken."""
        session, warmup = self.session, self.session.schedule.warmup_steps
        so_far = f"{duration(time.monotonic() - self._began_s)} so far"
        if session.stage is Stage.WINDOW:
            step_s = time.monotonic() - self._step_began_s
            self._line.show(f"step {session.window_steps + 1}, {duration(step_s)} so far")
        elif session.steps_done and self._warmup_step_s is not None:
            self._line.show(f"warm-up {session.steps_done}/{warmup}, {so_far}")
        else:
            self._line.show(f"{'compiling' if session.run.compile.is_enabled else 'first step'}, {so_far}")
