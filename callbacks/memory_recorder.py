"""Records the host's memory, and what keeps memory that grows."""

from __future__ import annotations

import time

import psutil

from lmbench.callbacks.allocator_recorder import AllocatorRecorder
from lmbench.callbacks.observer import Observer
from lmbench.instruments.host import peak_rss_bytes
from lmbench.instruments.keepers import CollectorWatch, GrowingContainers, garbage_bytes
from lmbench.instruments.window import ProbeKind
from lmbench.records.endurance import leak_limit
from lmbench.records.trends import growth_of
from lmbench.records.vocabulary import Stage

#: Seconds between two readings of the memory in the window: a reading takes some 30 us of the host.
_READING_INTERVAL_S = 0.05


class MemoryRecorder(Observer):
    """Records the memory of the host, and what keeps memory that grows; an AllocatorRecorder records the device's.

    Recorded under `memory`, beside the fields of the AllocatorRecorder:

    - `host_peak_rss_bytes`: peak resident memory of the process.
    - `host_bytes`, `reserved_bytes` of steps, whose slopes are `host_growth` and `reserved_growth`.
    - `keeper`: what keeps memory that grows, by the containers that grow over the probe steps.
    - `gc_s` of steps, and `collector.*`: collections of garbage.
    - `saved_bytes`, `expected_saved_bytes`: answers of the module's `count_saved_bytes()` and `expected_saved_bytes()`,
      which attention by itself has.
    """

    def prepare(self) -> None:
        self._growing: GrowingContainers | None = None
        if self.device.counters is not None:
            self.session.attach(AllocatorRecorder())

    def run_started(self) -> None:
        self.run.memory.host_peak_rss_bytes = peak_rss_bytes()
        self._record_answer("expected_saved_bytes", "expected_saved_bytes")

    def _record_answer(self, method: str, field: str) -> None:
        """Record how many bytes the module says it saves for the backward pass."""
        answer = getattr(self.module, method, None)
        if callable(answer) and self.module.training:
            setattr(self.run.memory, field, answer())

    def before_window(self) -> None:
        self._process, self._reading_due_s = psutil.Process(), 0.0

    def window_opened(self) -> None:
        CollectorWatch(self.run.collector, self._collected, self.undo)

    def _collected(self, seconds: float) -> None:
        step = self.session.step
        step.gc_s = (step.gc_s or 0.0) + seconds

    def step_ended(self) -> None:
        if self.session.stage is not Stage.WINDOW or time.monotonic() < self._reading_due_s:
            return
        self._reading_due_s = time.monotonic() + _READING_INTERVAL_S
        # Resident less shared memory: pages of files and of a loader's tensors come and go with the page cache.
        memory = self._process.memory_info()
        self.session.step.host_bytes = memory.rss - memory.shared
        if self.device.counters is not None:
            # `memory_reserved` would flatten and sort a hundred counters to return one.
            counters = self.device.counters.memory_stats_as_nested_dict(self.session.device)
            self.session.step.reserved_bytes = counters["reserved_bytes"]["all"]["current"]

    def window_closed(self) -> None:
        self.undo.close()
        self.run.memory.host_peak_rss_bytes = peak_rss_bytes()
        # The window's garbage is still there, and older objects are frozen.
        self._garbage_bytes = 0 if self.session.only_watches else garbage_bytes()

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind is ProbeKind.SETTLE:
            self._look_for_keepers()

    def _look_for_keepers(self) -> None:
        """Begin to watch containers where the window's memory grew, unless most of that was garbage in cycles."""
        steps = self.session.window_records
        growths = [growth_of(steps, name).low_bytes_per_step or 0.0 for name in ("host_bytes", "reserved_bytes")]
        self._growth = max(growths)
        if not steps or self._growth <= leak_limit(len(steps)):
            return
        if self._garbage_bytes > 0.5 * self._growth * len(steps):
            self.run.memory.keeper = "reference cycles, which Python's collector frees: it is off in the window"
        else:
            self._growing, self._growing_since = GrowingContainers(), self.session.steps_done

    def probe_ended(self, kind: ProbeKind) -> None:
        if kind is ProbeKind.MEMORY:
            self._record_answer("count_saved_bytes", "saved_bytes")

    def run_closing(self, exception: BaseException | None) -> None:
        if exception is not None:
            self.run.memory.host_peak_rss_bytes = peak_rss_bytes()
        elif self._growing is not None:
            steps = self.session.steps_done - self._growing_since
            self.run.memory.keeper = self._growing.keeper(steps, self._growth)
