"""What is done at the window's borders, once for every loop.

The session of a measured Trainer and the control arms of `lmbench overhead` share it, and the schedule, so that they
differ in nothing but the loop.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack

import torch

from lmbench.instruments.host import peak_rss_bytes
from lmbench.records.measured import Memory


class QuietCollector:
    """Collects and freezes garbage before the window, keeps the collector off in it, and restores it afterwards."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        #: After the window; once is enough.
        self.end = self._undo.close

    def begin(self, frozen_count: int | None = None) -> None:
        """Before the window.

        Args:
            frozen_count: objects frozen so far; None counts them, which takes 50 ms in a fork of a sweep's server.
        """
        gc.collect()
        # Objects that somebody else froze must stay so, and unfreezing knows no difference.
        if not (gc.get_freeze_count() if frozen_count is None else frozen_count):
            gc.freeze()
            self._undo.callback(gc.unfreeze)
        if gc.isenabled():
            gc.disable()
            self._undo.callback(gc.enable)


class AllocatorPeaks:
    """Peaks of the caching allocator over a run and over its window, and how often it retried; and the host's memory.

    PyTorch has one set of peaks, which is reset when the window opens: the run's are the highest of both parts. On a
    CPU only `host_peak_rss_bytes` is known.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_known = device.type == "cuda"
        self._run = (0, 0)

    def _read(self) -> tuple[int, int]:
        """Allocated and reserved bytes at most since the last reset; the run's peaks are not below them."""
        peaks = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        self._run = max(self._run[0], peaks[0]), max(self._run[1], peaks[1])
        return peaks

    def begin_window(self) -> None:
        if self.is_known:
            self._read()
            self._retries, self._reserved = self._retry_count(), torch.cuda.memory_reserved(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def end_window(self, memory: Memory) -> None:
        """Leave the window's peaks and the run's in the record."""
        memory.host_peak_rss_bytes = peak_rss_bytes()
        if self.is_known:
            memory.steady_peak_allocated_bytes, memory.steady_peak_reserved_bytes = self._read()
            memory.window_alloc_retry_count = self._retry_count() - self._retries
            memory.window_reserved_growth_bytes = torch.cuda.memory_reserved(self.device) - self._reserved
            self.end_run(memory)

    def end_run(self, memory: Memory) -> None:
        """Leave the run's peaks in the record, also where no window was closed."""
        memory.host_peak_rss_bytes = peak_rss_bytes()
        if self.is_known:
            self._read()
            memory.run_peak_allocated_bytes, memory.run_peak_reserved_bytes = self._run
            memory.run_alloc_retry_count = self._retry_count()
            memory.device_total_bytes = torch.cuda.get_device_properties(self.device).total_memory

    def _retry_count(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))
