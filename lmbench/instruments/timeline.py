"""From border stamps to step records: device spans, host spans and lags.

A timeline is a sequence of marks; the time between two neighbouring marks belongs to the phase that began at the
first. So the phases of a step partition it, and their sum is the step by construction; that the sum of the steps is
the window is checked against a second clock elsewhere.
"""

from __future__ import annotations

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
class Step:
    """A step that ended: its record, of which spans and lags follow when the device has passed it, and where the ring
    of scalars will have its losses (of each micro-batch) and its loss scale.

    `scalars` are the logged values by name: a slot of the ring (int) for a device scalar, a float for a host number.
    `lags_s` are seconds that the device was behind the host, by phase: at both ends of each of its parts.
    """

    record: StepRecord
    loss_slots: list[int] = field(default_factory=list)
    scalars: dict[str, list[int | float]] = field(default_factory=dict)
    scale_slot: int | None = None
    lags_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class Timeline:
    """Marks in, finished steps out."""

    def __init__(self, clock: HostClock) -> None:
        self.clock = clock
        self._stamp = clock.stamp
        self._marks: list[Mark] = []
        #: Steps whose marks are set but perhaps not yet reached by the device.
        self._pending: deque[tuple[Step, list[Mark]]] = deque()
        self._base_host_ns = 0
        self._device_s = 0.0  # device time since the base, at the first undrained mark
        # How much faster the device's clock runs than the host's, once it has been measured over a window.
        self.drift = 0.0

    def start(self, phase: str = "other") -> None:
        """Begin anew at an idle device: the next step starts here, and lags count from here."""
        self._pending.clear()
        self._marks = []
        self.border(phase)
        self._base_host_ns = self._marks[0].host_ns
        self._device_s = 0.0

    def border(self, phase: str) -> None:
        """A phase begins."""
        # The host's time is taken first: a mark on an idle device is then behind by its own launch, never ahead.
        host_ns = time.perf_counter_ns()
        self._marks.append(Mark(self._stamp(), host_ns, phase))

    def note(self) -> None:
        """One more mark inside the running phase (a block's border in a probe step)."""
        if self._marks:
            self.border(self._marks[-1].phase)

    def end_step(self, step: Step) -> None:
        """The step ends here, and the next begins."""
        self.border("other")
        self._pending.append((step, self._marks))
        self._marks = self._marks[-1:]

    def drain(self) -> list[Step]:
        """The steps that the device has finished since the last call, oldest first. Never waits."""
        finished = []
        while self._pending and self.clock.is_reached(self._pending[0][1][-1].stamp):
            step, marks = self._pending.popleft()
            self._resolve(step, marks)
            finished.append(step)
        return finished

    def _resolve(self, step: Step, marks: list[Mark]) -> None:
        """Complete a step by its spans and lags."""
        clock, record = self.clock, step.record
        device_s, host_s = defaultdict[str, float](float), defaultdict[str, float](float)
        for start, end in pairwise(marks):
            lag_s, span_s = self._lag_s(start), clock.seconds(start.stamp, end.stamp)
            self._device_s += span_s
            device_s[start.phase] += span_s
            host_s[start.phase] += (end.host_ns - start.host_ns) * 1e-9
            if clock.has_lag:
                step.lags_s[start.phase] += lag_s, self._lag_s(end)
        # The last mark is the next step's first: it stays out of the pool until that step is resolved.
        clock.recycle(mark.stamp for mark in marks[:-1])
        record.excluded_s = device_s.pop(EXCLUDED, 0.0)
        host_s.pop(EXCLUDED, None)
        record.step_s, record.step_host_s = sum(device_s.values()), sum(host_s.values())
        for phase in PHASES:
            # A phase that was never seen has no time, which is not the same as no duration.
            setattr(record, f"{phase}_s", device_s.get(phase))
            setattr(record, f"{phase}_host_s", host_s.get(phase))
        for border in BORDERS:
            lags_s = step.lags_s.get("other" if border == "step" else border)
            setattr(record, f"lag_{border}_s", lags_s[-1] if lags_s else None)

    def _lag_s(self, mark: Mark) -> float:
        """Lag at a mark, when `_device_s` has been advanced to it."""
        return self._device_s - (mark.host_ns - self._base_host_ns) * 1e-9 * (1.0 + self.drift)

    def calibrate(self) -> float | None:
        """Measure, and from now on correct, how much faster the device's clock ran than the host's since `start`.

        Call on an idle device after a `drain`: the lag of one more mark, which should be zero there, is the drift. None
        where the clock has no lag.
        """
        if not self.clock.has_lag:
            return None
        self._device_s += self.since_step_s()
        self._marks = self._marks[-1:]
        elapsed_s = (self._marks[0].host_ns - self._base_host_ns) * 1e-9
        if elapsed_s > 0:
            self.drift += self._lag_s(self._marks[0]) / elapsed_s
        return self.drift

    def since_step_s(self) -> float:
        """Device seconds from the end of the last step to now, on an idle device."""
        self.border("other")
        while not self.clock.is_reached(self._marks[-1].stamp):
            pass
        return sum(self.clock.seconds(start.stamp, end.stamp) for start, end in pairwise(self._marks))
