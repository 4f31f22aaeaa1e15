"""One recording by torch.profiler: prepare, start, stop, write."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lmbench.errors import UsageError

# Level 9, gzip's default, takes four times as long for 5 % less.
COMPRESSION_LEVEL = 4


class Recording:
    """A trace of operators and, on a GPU, of kernels; PyTorch has one profiler in a process.

    Raises:
        UsageError: (in `prepare`) another profiler is running.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile: Any = None
        self._is_started = False

    @property
    def is_prepared(self) -> bool:
        return self._profile is not None

    def prepare(self) -> None:
        """Switch the instruments on, so that the steps until `start` pay for that and not the recorded ones."""
        if torch.autograd.profiler._is_profiler_enabled:
            raise UsageError("a profiler is running in this process already; stop it, or drop the KernelProfiler")
        # Kineto tells standard error when it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.prepare_trace()

    def start(self) -> None:
        self._profile.start_trace()
        self._is_started = True

    def stop(self, metadata: dict[str, Any] | None = None) -> None:
        """Stop, whatever state it is in; metadata becomes the trace's top-level key `lmbench`."""
        if self._profile is None:
            return
        if not self._is_started:
            # Kineto, once prepared, goes on until it was started and stopped.
            self._profile.start_trace()
        self._is_started = False
        if metadata is not None:
            self._profile.add_metadata_json("lmbench", json.dumps(metadata))
        self._profile.stop_trace()

    def write(self, path: Path) -> int:
        """The trace as a gzip file, whole or not at all; returns its size in bytes.

        Raises:
            OSError: it cannot be written, also where Kineto keeps to itself why.
        """
        recorded, self._profile = self._profile, None
        # In a folder of its own: Kineto leaves unfinished files under names of its choice.
        with TemporaryDirectory(dir=path.parent, prefix=".trace-") as folder:
            plain, packed = Path(folder, "trace.json"), Path(folder, path.name)
            recorded.export_chrome_trace(str(plain))
            if not plain.exists():
                free_mib = shutil.disk_usage(folder).free >> 20
                for unfinished in Path(folder).iterdir():
                    # Kineto keeps it open, and its space would stay taken while the last steps are written.
                    os.truncate(unfinished, 0)
                raise OSError(f"the profiler wrote no trace, with {free_mib} MiB of disk free")
            with plain.open("rb") as source, gzip.open(packed, "wb", COMPRESSION_LEVEL) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            packed.replace(path)
        return path.stat().st_size
