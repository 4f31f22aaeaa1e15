"""Switching PyTorch's history of the CUDA allocator on and off, and writing the snapshot."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any, Protocol

import torch

from lmbench.instruments.clock import synchronize
from lmbench.memory.recorded import AllocatorPeaks

#: Read by pytorch.org/memory_viz too, which knows no later one.
_PROTOCOL = 4


class History(Protocol):
    """An allocator that can remember what it does."""

    def start(self, max_entries: int, *, resets_peaks: bool) -> None:
        """Forget what was, and remember up to so many entries from now on; the allocator's peaks begin anew too where
        that is wanted."""

    def drop_workspaces(self) -> None:
        """Give back what the matrix libraries keep between calls."""

    def peaks(self) -> AllocatorPeaks:
        """The allocator's own figures since they were reset."""

    def write(self, path: Path) -> int:
        """The history as a pickle, whole or not at all; returns its size in bytes. Raises OSError."""

    def stop(self) -> None:
        """Remember nothing any more. May be called again."""


class CudaHistory:
    """The history of PyTorch's caching allocator on one device, with Python's stacks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, max_entries: int, *, resets_peaks: bool) -> None:
        if resets_peaks:
            # From here on they are those of the recorded steps.
            torch.cuda.reset_peak_memory_stats(self._device)
        record = torch.cuda.memory._record_memory_history
        wanted = {"clear_history": True, "global_record_annotations": True}
        # Ranges of other threads than this one, which runs the backward of a CUDA device on none of Python's, are
        # noted since PyTorch 2.9.
        known = inspect.signature(torch.cuda.memory._record_memory_history_impl).parameters
        options: dict[str, Any] = {name: value for name, value in wanted.items() if name in known}
        record(enabled="all", context="all", stacks="python", max_entries=max_entries, device=self._device, **options)

    def drop_workspaces(self) -> None:
        synchronize(self._device)
        torch._C._cuda_clearCublasWorkspaces()

    def peaks(self) -> AllocatorPeaks:
        stats = torch.cuda.memory_stats(self._device)
        return AllocatorPeaks(
            *(stats.get(f"{name}_bytes.all.peak", 0) for name in ("allocated", "requested", "reserved"))
        )

    def write(self, path: Path) -> int:
        content = torch.cuda.memory._snapshot(self._device)
        unfinished = path.with_name(f".{path.name}")
        try:
            with unfinished.open("wb") as file:
                pickle.dump(content, file, protocol=_PROTOCOL)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return path.stat().st_size

    def stop(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None, device=self._device)
