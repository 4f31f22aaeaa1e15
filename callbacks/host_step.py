"""Times the host's work for a step, without its waits for the device and for the loader."""

from __future__ import annotations

import math
import time

from lmbench.callbacks.observer import Observer
from lmbench.instruments.timeline import ProbeMarks
from lmbench.records.run import Profile
from lmbench.records.vocabulary import Stage


class HostStep(Observer):
    """Lets the host of warm-up steps wait for the device behind every block and phase, and times the rest of them.

    A CUDA device takes some 1000 launches in advance. Where a step has more of them and the device is slower, the host
    waits for room, and its time for a step is the device's. A profiler slows the host, also after it has stopped.

    Recorded under `profile`:

    - `host_step_s`: least host seconds of these steps, without phase `data`. The first step of the warm-up compiles,
      and the last one is the profiler's own warm-up: null where there are no others.
    """

    def run_started(self) -> None:
        self._profile = self.run.profile = self.run.profile or Profile()
        self._began_s: float | None = None
        self._waited_s = 0.0
        self._loading_since_s: float | None = None

    def step_ended(self) -> None:
        if self._began_s is not None:
            host_s = time.perf_counter() - self._began_s - self._waited_s
            self._profile.host_step_s = min(host_s, self._profile.host_step_s or math.inf)
        is_inside = 1 <= self.session.steps_done < self.session.schedule.warmup_steps - 1
        if self.session.stage is not Stage.WARMUP or not is_inside:
            self.undo.close()
            self._began_s = None
            return
        if self._began_s is None:
            self.undo.enter_context(ProbeMarks(self.module, self._wait))
            self.session.track.listen(self._border, self.undo)
        self.device.synchronize()
        self._began_s, self._waited_s = time.perf_counter(), 0.0

    def _border(self, phase: str) -> None:
        self._wait()
        now_s = time.perf_counter()
        if self._loading_since_s is not None:
            self._waited_s += now_s - self._loading_since_s
        self._loading_since_s = now_s if phase == "data" else None

    def _wait(self) -> None:
        began_s = time.perf_counter()
        self.device.synchronize()
        self._waited_s += time.perf_counter() - began_s
