"""Times the host's work for a step, without its waits for the device."""

from __future__ import annotations

import time

from lmbench.callbacks.observer import Observer
from lmbench.device import synchronize
from lmbench.instruments.timeline import ProbeMarks
from lmbench.records.run import Profile
from lmbench.records.vocabulary import Stage

#: The first step of the warm-up compiles, and its last one is the profiler's own warm-up.
FIRST, LAST = 1, 1


class HostStep(Observer):
    """Lets the host of warm-up steps wait for the device behind every block, and times the rest of these steps.

    A CUDA device takes some 1000 launches in advance. Where a step has more of them and the device is slower, the host
    waits for room, and its time for a step is the device's. A profiler slows the host, also after it has stopped.

    Recorded under `profile`:

    - `host_step_s`: least host seconds of these steps; null where the warm-up has fewer than three steps.
    """

    def run_started(self) -> None:
        # A KernelCapture behind this callback puts its own in this place.
        self.session.run.profile = Profile()
        self._steps_s = list[float]()
        self._began_s: float | None = None
        self._waited_s = 0.0

    def step_ended(self) -> None:
        profile = self.session.run.profile
        if profile is not None and self._began_s is not None:
            self._steps_s.append(time.perf_counter() - self._began_s - self._waited_s)
            profile.host_step_s = min(self._steps_s)
        is_inside = FIRST <= self.session.steps_done < self.session.schedule.warmup_steps - LAST
        if self.session.stage is not Stage.WARMUP or not is_inside:
            self.undo.close()
            self._began_s = None
            return
        if self._began_s is None:
            self.undo.enter_context(ProbeMarks(self.module, self._wait))
        synchronize(self.session.device)
        self._began_s, self._waited_s = time.perf_counter(), 0.0

    def _wait(self) -> None:
        began_s = time.perf_counter()
        synchronize(self.session.device)
        self._waited_s += time.perf_counter() - began_s
