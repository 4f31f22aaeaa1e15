"""Records peak memory of the device over the whole run, over the window, and by phase."""

from __future__ import annotations

from collections import Counter

from lmbench.callbacks.observer import Observer
from lmbench.instruments.window import ProbeKind
from lmbench.memory.recording import held_by
from lmbench.records.field import PerPhase
from lmbench.records.measured import RefusedAllocation
from lmbench.records.vocabulary import PHASES


class AllocatorRecorder(Observer):
    """Records peaks of PyTorch's caching allocator: at the window's borders, and by phase in probe steps only.

    The MemoryRecorder adds it where the device has such an allocator. PyTorch keeps one set of peaks. This callback
    resets it when a run is set up, when the window opens and in probe steps, so `torch.cuda.max_memory_allocated()` in
    your own code then sees less. So the run's peaks are the highest of all readings.

    Recorded under `memory`:

    - `run_peak_allocated_bytes`, `run_peak_reserved_bytes`: peaks from the first allocation to the window's end. They
      decide whether a run fits.
    - `steady_peak_allocated_bytes`, `steady_peak_reserved_bytes`: peaks inside the window.
    - `phase_peak_allocated_bytes`, `phase_begin_allocated_bytes`: by phase, its peak and its bytes at the beginning.
    - `run_alloc_retry_count`, `window_alloc_retry_count`: allocations that first had to empty the cache.
    - `initial_allocated_bytes`: bytes before the first step.
    - `window_reserved_growth_bytes`: growth of the reserved bytes inside the window.
    - `device_total_bytes`: memory of the device.
    - `refused`: what the device held when it ran out of memory; null if it never did.
    """

    def prepare(self) -> None:
        # The allocator calls this before the exception unwinds the stack and frees tensors.
        self.device.watch_refusals(self._record_refusal)
        self._counters = self.device.counters
        #: All readings of the peaks of allocated and reserved bytes.
        self._peaks = list[tuple[int, int]]()
        self._phase_peaks, self._phase_begins = Counter[str](), Counter[str]()
        self._reset_peaks()
        self._retries_before = self._retry_count()

    def run_started(self) -> None:
        self.run.memory.initial_allocated_bytes = self._counters.memory_allocated(self.session.device)

    def before_window(self) -> None:
        self._read_peaks()
        self._retries, self._reserved = self._retry_count(), self._counters.memory_reserved(self.session.device)
        self._reset_peaks()

    def window_closed(self) -> None:
        memory = self.run.memory
        memory.steady_peak_allocated_bytes, memory.steady_peak_reserved_bytes = self._read_peaks()
        memory.window_alloc_retry_count = self._retry_count() - self._retries
        memory.window_reserved_growth_bytes = self._counters.memory_reserved(self.session.device) - self._reserved
        self._record_run()

    def run_closing(self, exception: BaseException | None) -> None:
        if exception is not None:
            # The window may not have been closed.
            self._record_run()

    def _record_run(self) -> None:
        memory, device = self.run.memory, self.session.device
        self._read_peaks()
        memory.run_peak_allocated_bytes, memory.run_peak_reserved_bytes = map(max, zip(*self._peaks, strict=True))
        memory.run_alloc_retry_count = self._retry_count() - self._retries_before
        memory.device_total_bytes = self._counters.get_device_properties(device).total_memory

    def _read_peaks(self) -> tuple[int, int]:
        """Peaks of allocated and reserved bytes since the last reset."""
        counters, device = self._counters, self.session.device
        self._peaks.append((counters.max_memory_allocated(device), counters.max_memory_reserved(device)))
        return self._peaks[-1]

    def _reset_peaks(self) -> None:
        self._counters.reset_peak_memory_stats(self.session.device)

    def _retry_count(self) -> int:
        return int(self._counters.memory_stats(self.session.device).get("num_alloc_retries", 0))

    # phases of probe steps

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind is ProbeKind.MEMORY:
            self._phase = self.session.track.current
            self._reset_peaks()
            self.session.track.listen(self._border, self.undo)

    def step_ended(self) -> None:
        if self.session.probe_kind is ProbeKind.MEMORY:
            self._end_phase()

    def probe_ended(self, kind: ProbeKind) -> None:
        if kind is ProbeKind.MEMORY:
            self.undo.close()
            self.run.memory.phase_peak_allocated_bytes = PerPhase(**self._phase_peaks)
            self.run.memory.phase_begin_allocated_bytes = PerPhase(**self._phase_begins)

    def _border(self, phase: str) -> None:
        self._end_phase()
        if phase in PHASES:
            allocated = self._counters.memory_allocated(self.session.device)
            self._phase_begins[phase] = max(allocated, self._phase_begins[phase])
        self._phase = phase

    def _end_phase(self) -> None:
        """Credit the peak since the last border to the phase that ends here."""
        peak = self._counters.max_memory_allocated(self.session.device)
        self._reset_peaks()
        if self._phase in PHASES:
            self._phase_peaks[self._phase] = max(peak, self._phase_peaks[self._phase])

    def _record_refusal(self, device: int, requested_bytes: int, device_free_bytes: int) -> None:
        held = held_by(self.module, self.trainer.optimizers, self.session.device.type)
        allocated, reserved = self._counters.memory_allocated(device), self._counters.memory_reserved(device)
        self.run.memory.refused = RefusedAllocation(
            self.session.track.current, requested_bytes, allocated, reserved, device_free_bytes, *held,
            rest_bytes=max(0, allocated - sum(held)),
        )  # fmt: skip
