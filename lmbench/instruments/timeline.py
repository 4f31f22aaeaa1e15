"""From border stamps to step records: device spans, host spans and lags.

A timeline is a sequence of marks; the time between two neighbouring marks belongs to the phase that began at the
first. So the phases of a step partition it, and their sum is the step by construction; that the sum of the steps is
the window is checked against a second clock elsewhere.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from lmbench.instruments.clock import HostClock
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import BORDERS, EXCLUDED, PHASES


class Mark(NamedTuple):
    stamp: Any
    host_ns: int
    phase: str  # that begins here


@dataclass
class StepFacts:
    """What is known of a step when it ends: its record as far as the host knows it, and where the ring of scalars will
    have its losses (of each micro-batch) and its loss scale.

    `scalars` are the logged values by name: a slot of the ring (int) for a device scalar, a float for a host number.
    """

    record: StepRecord
    loss_slots: list[int] = field(default_factory=list)
    scalars: dict[str, list[int | float]] = field(default_factory=dict)
    scale_slot: int | None = None


@dataclass
class StepSpans:
    """A finished step. All spans in seconds; `lags` are seconds the device was behind the host."""

    facts: StepFacts
    device_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    host_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    excluded_s: float = 0.0
    end_lag_s: dict[str, float] = field(default_factory=dict)
    min_lag_s: dict[str, float] = field(default_factory=dict)
    mark_count: dict[str, int] = field(default_factory=dict)


class Timeline:
    """Marks in, finished steps out."""

    def __init__(self, clock: HostClock) -> None:
        self.clock = clock
        self._stamp = clock.stamp
        self._marks: list[Mark] = []
        #: Steps whose marks are set but perhaps not yet reached by the device.
        self._pending: deque[tuple[StepFacts, list[Mark]]] = deque()
        self._base_host_ns = 0
        self._device_s = 0.0  # device time since the base, at the first undrained mark
        # How much faster the device's clock runs than the host's, once it has been measured over a window.
        self.drift = 0.0

    def start(self, phase: str = "other") -> None:
        """Begin anew at an idle device: the next step starts here, and lags count from here."""
        self._pending.clear()
        mark = self._mark(phase)
        self._marks = [mark]
        self._base_host_ns = mark.host_ns
        self._device_s = 0.0

    def _mark(self, phase: str) -> Mark:
        # The host's time is taken first: a mark on an idle device is then behind by its own launch, never ahead.
        host_ns = time.perf_counter_ns()
        return Mark(self.clock.stamp(), host_ns, phase)

    def border(self, phase: str) -> None:
        """A phase begins."""
        # `_mark` without the call: this is the one that runs a dozen times a step.
        host_ns = time.perf_counter_ns()
        self._marks.append(Mark(self._stamp(), host_ns, phase))

    def note(self) -> None:
        """One more mark inside the running phase (a block's border in a probe step)."""
        if self._marks:
            self._marks.append(self._mark(self._marks[-1].phase))

    def end_step(self, facts: StepFacts, phase: str = "other") -> None:
        """The step ends here, and the next begins, in `phase`."""
        mark = self._mark(phase)
        self._marks.append(mark)
        self._pending.append((facts, self._marks))
        self._marks = [mark]

    def drain(self) -> list[StepSpans]:
        """The steps that the device has finished since the last call, oldest first. Never waits."""
        finished = []
        while self._pending and self.clock.is_reached(self._pending[0][1][-1].stamp):
            finished.append(self._resolve(*self._pending.popleft()))
        return finished

    def _resolve(self, facts: StepFacts, marks: list[Mark]) -> StepSpans:
        clock, spans = self.clock, StepSpans(facts)
        device, host = spans.device_s, spans.host_s
        for start, end in pairwise(marks):
            lag = self._lag(start)
            seconds = clock.seconds(start.stamp, end.stamp)
            self._device_s += seconds
            if start.phase == EXCLUDED:
                spans.excluded_s += seconds
                continue
            phase = start.phase
            device[phase] += seconds
            host[phase] += (end.host_ns - start.host_ns) * 1e-9
            if clock.has_lag:
                spans.end_lag_s[phase] = end_lag = self._lag(end)
                spans.min_lag_s[phase] = min(spans.min_lag_s.get(phase, math.inf), lag, end_lag)
                spans.mark_count[phase] = spans.mark_count.get(phase, 1) + 1
        # The last mark is the next step's first: it stays out of the pool until that step is resolved.
        clock.recycle(mark.stamp for mark in marks[:-1])
        return spans

    def _lag(self, mark: Mark) -> float:
        """Lag at a mark, when `_device_s` has been advanced to it."""
        return self._device_s - (mark.host_ns - self._base_host_ns) * 1e-9 * (1.0 + self.drift)

    def calibrate(self) -> float | None:
        """Measure, and from now on correct, how much faster the device's clock ran than the host's since `start`.

        Call on an idle device after a `drain`: the lag of one more mark, which should be zero there, is the drift. None
        where the clock has no lag.
        """
        if not self.clock.has_lag:
            return None
        mark = self._mark("other")
        assert not self._pending, "steps not drained yet"
        self._device_s += self._since_step_s(mark)
        elapsed_s = (mark.host_ns - self._base_host_ns) * 1e-9
        self._marks = [mark]
        if elapsed_s > 0:
            self.drift += self._lag(mark) / elapsed_s
        return self.drift

    def since_step_s(self) -> float:
        """Device seconds from the end of the last step to now, on an idle device."""
        return self._since_step_s(self._mark("other"))

    def _since_step_s(self, mark: Mark) -> float:
        while not self.clock.is_reached(mark.stamp):
            pass
        return sum(self.clock.seconds(start.stamp, end.stamp) for start, end in pairwise([*self._marks, mark]))


def step_record(spans: StepSpans) -> StepRecord:
    """The step's record with its spans and lags (SI units)."""
    record = spans.facts.record
    record.step_s = sum(spans.device_s.values())
    record.step_host_s = sum(spans.host_s.values())
    for phase in PHASES:
        # A phase that was never seen has no time, which is not the same as no duration.
        setattr(record, f"{phase}_s", spans.device_s.get(phase))
        setattr(record, f"{phase}_host_s", spans.host_s.get(phase))
    for border in BORDERS:
        setattr(record, f"lag_{border}_s", spans.end_lag_s.get("other" if border == "step" else border))
    record.excluded_s = spans.excluded_s
    return record
