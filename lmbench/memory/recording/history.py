"""Switching PyTorch's history of the CUDA allocator on and off, and writing the snapshot."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function

from lmbench.instruments.clock import synchronize
from lmbench.memory.recorded import WORKSPACES, AllocatorPeaks

#: Read by pytorch.org/memory_viz too, which knows no later one.
_PROTOCOL = 4


class CudaHistory:
    """The history of PyTorch's caching allocator on one device, with Python's stacks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, max_entries: int, *, resets_peaks: bool) -> None:
        """Forget what was, and remember up to so many entries from now on; the allocator's peaks begin anew too where
        that is wanted."""
        if resets_peaks:
            # From here on they are those of the recorded steps.
            torch.cuda.reset_peak_memory_stats(self._device)
        # Ranges of other threads than this one, which runs the backward of a CUDA device on none of Python's, are
        # noted since PyTorch 2.9.
        known = inspect.signature(torch.cuda.memory._record_memory_history_impl).parameters
        options: dict[str, Any] = {
            name: True for name in ("clear_history", "global_record_annotations") if name in known
        }
        torch.cuda.memory._record_memory_history(
            enabled="all", context="all", stacks="python", max_entries=max_entries, device=self._device, **options
        )

    def drop_workspaces(self) -> None:
        """Give back what the matrix libraries keep between calls, and let the history see it go."""
        with record_function(WORKSPACES):
            synchronize(self._device)
            torch._C._cuda_clearCublasWorkspaces()

    def peaks(self) -> AllocatorPeaks:
        """The allocator's own figures since they were reset."""
        stats = torch.cuda.memory_stats(self._device)
        names = ("allocated", "requested", "reserved")
        return AllocatorPeaks(*(stats.get(f"{name}_bytes.all.peak", 0) for name in names))

    def write(self, path: Path) -> int:
        """The history as a pickle, whole or not at all; returns its size in bytes. Raises OSError."""
        content = torch.cuda.memory._snapshot(self._device)
        unfinished = path.with_name(f".{path.name}")
        try:
            unfinished.write_bytes(pickle.dumps(content, protocol=_PROTOCOL))
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return path.stat().st_size

    def stop(self) -> None:
        """Remember nothing any more. May be called again."""
        torch.cuda.memory._record_memory_history(enabled=None, device=self._device)
