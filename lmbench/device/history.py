"""The history of PyTorch's caching allocator on one GPU, with stacks of Python."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from lmbench.records.store import write_whole

#: The latest protocol of pickles that pytorch.org/memory_viz reads.
_PROTOCOL = 4


class History:
    """Records every allocation of one GPU from `start` to `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, max_entries: int, *, resets_peaks: bool) -> None:
        """Clear the history and record up to `max_entries` from now on.

        `resets_peaks` also resets the allocator's peaks, so that `peaks` are those of the recorded steps.
        """
        if resets_peaks:
            torch.cuda.reset_peak_memory_stats(self._device)
        # Record the ranges of all threads: the backward on a CUDA device runs on a thread that Python did not start.
        torch.cuda.memory._record_memory_history(
            "all", "all", "python", max_entries, self._device, clear_history=True, global_record_annotations=True
        )

    def drop_workspaces(self) -> None:
        """Free the workspaces that the matrix libraries keep between calls."""
        torch.cuda.synchronize(self._device)
        torch._C._cuda_clearCublasWorkspaces()

    def peaks(self) -> list[int]:
        """The peaks of allocated, requested and reserved bytes by the allocator's own counters since their reset."""
        stats = torch.cuda.memory_stats(self._device)
        return [stats.get(f"{name}_bytes.all.peak", 0) for name in ("allocated", "requested", "reserved")]

    def write(self, path: Path) -> None:
        """Write the history as a pickle, whole or not at all. Raises OSError."""
        write_whole(path, pickle.dumps(torch.cuda.memory._snapshot(self._device), protocol=_PROTOCOL))

    def stop(self) -> None:
        """Stop recording and drop the history; may be called again."""
        torch.cuda.memory._record_memory_history(enabled=None, device=self._device)
