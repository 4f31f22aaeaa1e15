"""Records peak memory of the whole run, of the window, and of every phase."""

from __future__ import annotations

import time
from collections import Counter

import psutil

from lmbench.callbacks.observer import Observer
from lmbench.instruments.host import peak_rss_bytes
from lmbench.instruments.keepers import CollectorWatch, GrowingContainers, garbage_bytes
from lmbench.instruments.window import AllocatorPeaks, ProbeKind
from lmbench.memory.recording import held_by
from lmbench.records.endurance import leak_limit
from lmbench.records.field import PerPhase
from lmbench.records.measured import RefusedAllocation
from lmbench.records.trends import growth_of
from lmbench.records.vocabulary import PHASES, Stage

#: Seconds between two readings of the memory in the window: a reading takes some 30 us of the host.
_READING_INTERVAL_S = 0.05


class MemoryRecorder(Observer):
    """Records peaks of PyTorch's caching allocator: read at the window's borders, and by phase in probe steps only.

    PyTorch keeps one set of peaks. This callback resets it when the window opens and in probe steps, so
    `torch.cuda.max_memory_allocated()` in your own code then sees less.

    Recorded under `memory`; on a CPU only the last two groups:

    - `run_peak_allocated_bytes`, `run_peak_reserved_bytes`: peaks from the first allocation to the window's end. They
      decide whether a run fits.
    - `steady_peak_allocated_bytes`, `steady_peak_reserved_bytes`: peaks inside the window.
    - `phase_peak_allocated_bytes`, `phase_begin_allocated_bytes`: by phase, its peak and its bytes at the beginning.
    - `run_alloc_retry_count`, `window_alloc_retry_count`: allocations that first had to empty the cache.
    - `initial_allocated_bytes`: bytes before the first step.
    - `window_reserved_growth_bytes`: growth of the reserved bytes inside the window.
    - `device_total_bytes`: memory of the device.
    - `refused`: what the device held when it ran out of memory; null if it never did.
    - `host_peak_rss_bytes`: peak resident memory of the process.
    - `host_bytes`, `reserved_bytes` of steps, whose slopes are `host_growth` and `reserved_growth`.
    - `keeper`: what keeps memory that grows, by the containers that grow over the probe steps.
    - `gc_s` of steps, and `collector.*`: collections of garbage.
    - `saved_bytes`, `expected_saved_bytes`: answers of the module's `count_saved_bytes()` and `expected_saved_bytes()`,
      which attention by itself has.
    """

    def prepare(self) -> None:
        # The allocator calls this before the exception unwinds the stack and frees tensors.
        self.device.watch_refusals(self._record_refusal)
        self._counters = self.device.counters
        self._peaks = AllocatorPeaks(self.device)
        self._phase_peaks, self._phase_begins = Counter[str](), Counter[str]()
        self._growing: GrowingContainers | None = None

    def run_started(self) -> None:
        self.run.memory.host_peak_rss_bytes = peak_rss_bytes()
        if self._counters is not None:
            self.run.memory.initial_allocated_bytes = self._counters.memory_allocated(self.session.device)
        self._record_answer("expected_saved_bytes", "expected_saved_bytes")

    def _record_answer(self, method: str, field: str) -> None:
        """Record how many bytes the module says it saves for the backward pass."""
        answer = getattr(self.module, method, None)
        if callable(answer) and self.module.training:
            setattr(self.run.memory, field, answer())

    def before_window(self) -> None:
        self._peaks.begin_window()
        self._process, self._reading_due_s = psutil.Process(), 0.0

    def window_opened(self) -> None:
        CollectorWatch(self.run.collector, self._collected, self.undo)

    def _collected(self, seconds: float) -> None:
        step = self.session.step
        step.gc_s = (step.gc_s or 0.0) + seconds

    def window_closed(self) -> None:
        self.undo.close()
        self._peaks.end_window(self.run.memory)
        # The window's garbage is still there, and older objects are frozen.
        self._garbage_bytes = 0 if self.session.only_watches else garbage_bytes()

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

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind is ProbeKind.SETTLE:
            self._look_for_keepers()
        if kind is ProbeKind.MEMORY and self._counters is not None:
            self._phase = self.session.track.current
            self._counters.reset_peak_memory_stats(self.session.device)
            self.session.track.listen(self._border, self.undo)

    def step_ended(self) -> None:
        if self.session.stage is Stage.WINDOW and time.monotonic() >= self._reading_due_s:
            self._read_memory()
        if self.session.probe_kind is ProbeKind.MEMORY and self._counters is not None:
            self._end_phase()

    def _read_memory(self) -> None:
        """Note the memory of this process alone, and what the caching allocator has reserved, in the running step."""
        self._reading_due_s = time.monotonic() + _READING_INTERVAL_S
        # Resident less shared memory: pages of files and of a loader's tensors come and go with the page cache.
        memory = self._process.memory_info()
        self.session.step.host_bytes = memory.rss - memory.shared
        if self._counters is not None:
            # `memory_reserved` would flatten and sort a hundred counters to return one.
            counters = self._counters.memory_stats_as_nested_dict(self.session.device)
            self.session.step.reserved_bytes = counters["reserved_bytes"]["all"]["current"]

    def probe_ended(self, kind: ProbeKind) -> None:
        if kind is not ProbeKind.MEMORY:
            return
        self._record_answer("count_saved_bytes", "saved_bytes")
        if self._counters is not None:
            memory = self.run.memory
            self.undo.close()
            memory.phase_peak_allocated_bytes = PerPhase(**self._phase_peaks)
            memory.phase_begin_allocated_bytes = PerPhase(**self._phase_begins)

    def run_closing(self, exception: BaseException | None) -> None:
        if exception is not None:
            self._peaks.end_run(self.run.memory)
        elif self._growing is not None:
            steps = self.session.steps_done - self._growing_since
            self.run.memory.keeper = self._growing.keeper(steps, self._growth)

    def _record_refusal(self, device: int, requested_bytes: int, device_free_bytes: int) -> None:
        held = held_by(self.module, self.trainer.optimizers, self.session.device.type)
        allocated, reserved = self._counters.memory_allocated(device), self._counters.memory_reserved(device)
        self.run.memory.refused = RefusedAllocation(
            self.session.track.current, requested_bytes, allocated, reserved, device_free_bytes, *held,
            rest_bytes=max(0, allocated - sum(held)),
        )  # fmt: skip

    def _border(self, phase: str) -> None:
        self._end_phase()
        if phase in PHASES:
            allocated = self._counters.memory_allocated(self.session.device)
            self._phase_begins[phase] = max(allocated, self._phase_begins[phase])
        self._phase = phase

    def _end_phase(self) -> None:
        """Credit the peak since the last border to the phase that ends here."""
        peak = self._counters.max_memory_allocated(self.session.device)
        self._counters.reset_peak_memory_stats(self.session.device)
        if self._phase in PHASES:
            self._phase_peaks[self._phase] = max(peak, self._phase_peaks[self._phase])
