"""Times the host's work for a step, without its waits for the device."""

from __future__ import annotations

import time

from lmbench.callbacks.observer import Observer
from lmbench.device import synchronize
from lmbench.instruments.timeline import ProbeMarks
from lmbench.instruments.window import ProbeKind

#: The host's speed varies from step to step, so the least of several counts.
STEPS = 3


class HostStep(Observer):
    """Takes probe steps in which the host waits for the device behind every block, and times the rest of them.

    A CUDA device takes some 1000 launches in advance. Where a step has more of them and the device is slower, the host
    waits for room, and its time for a step is the device's.

    Recorded under `probe`:

    - `host_step_s`: least host seconds of these steps.
    """

    def run_started(self) -> None:
        self.own_probes = (ProbeKind.UNQUEUED,) * min(STEPS, self.session.schedule.probe_steps)

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind is ProbeKind.UNQUEUED:
            self._steps_s = list[float]()
            self.undo.enter_context(ProbeMarks(self.module, self._wait))
            self._begin()

    def step_ended(self) -> None:
        if self.session.probe_kind is ProbeKind.UNQUEUED:
            self._steps_s.append(time.perf_counter() - self._began_s - self._waited_s)
            self._begin()

    def probe_ended(self, kind: ProbeKind) -> None:
        if kind is ProbeKind.UNQUEUED:
            self.undo.close()
            self.session.run.probe.host_step_s = min(self._steps_s, default=None)

    def _begin(self) -> None:
        synchronize(self.session.device)
        self._began_s, self._waited_s = time.perf_counter(), 0.0

    def _wait(self) -> None:
        began_s = time.perf_counter()
        synchronize(self.session.device)
        self._waited_s += time.perf_counter() - began_s
