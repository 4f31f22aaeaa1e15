"""The recording of some steps: named ranges around what runs, and a trace by torch.profiler (or Nsight, from outside).

The ranges are for both: those of the profiler, and by NVTX those of an external one.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lmbench.errors import UsageError
from lmbench.instruments.clock import synchronize
from lmbench.instruments.ranges import ModuleRanges, StepRanges
from lmbench.kernels.recorded import NOTES, TraceNotes
from lmbench.kernels.recording.graph_origins import GraphOrigins

# Level 9, gzip's default, takes four times as long for 5 % less.
COMPRESSION_LEVEL = 4
Tool = Literal["torch", "nsys"]


class Recording:
    """Recording of steps of a module; whole ones are counted in `steps`.

    Args:
        module: what is trained; each of its modules has a range around its forward.
        device: where it runs.
        tool: `torch` records a trace, `nsys` only sets ranges, and the marks between which Nsight Systems records.

    From its making until `stop`, it listens to what Inductor compiles.
    """

    def __init__(self, module: nn.Module, device: torch.device, tool: Tool) -> None:
        self.steps = 0
        self._module, self._device, self._tool = module, device, tool
        self._uses_nvtx = device.type == "cuda"
        self.ranges = StepRanges(self._uses_nvtx)
        self._modules: ModuleRanges | None = None
        self._profile: Any = None
        self._origins: GraphOrigins | None = None
        if tool == "torch":
            self._origins = GraphOrigins()
            self._origins.listen()

    def prepare(self) -> None:
        """Switch the instruments on, so that the steps until `start` pay for that and not the recorded ones.

        Raises UsageError where another profiler is running: PyTorch has one in a process.
        """
        if self._origins is None or self._profile is not None:
            return
        if torch.autograd.profiler._is_profiler_enabled:
            raise UsageError("a profiler is running in this process already; stop it, or drop the KernelProfiler")
        # Kineto tells standard error when it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._uses_nvtx else [])]
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.prepare_trace()

    def start(self) -> None:
        """Begin, on an idle device and outside of steps."""
        self._modules = ModuleRanges(self._module, self._uses_nvtx)
        if self._profile is not None:
            self._profile.start_trace()
        elif self._tool == "nsys" and self._uses_nvtx:
            torch.cuda.profiler.start()

    def end_step(self) -> None:
        """A whole step is over."""
        self.ranges.end()
        self.steps += 1

    def stop(self, file: Path) -> int | None:
        """Stop, whatever state it is in, and write the trace; returns its size in bytes, None where there is none.

        May be called again. Raises OSError where the trace cannot be written.
        """
        self.ranges.end()
        modules, self._modules = self._modules, None
        recorded, self._profile = self._profile, None
        if modules is not None:
            modules.remove()
            if self._tool == "nsys" and self._uses_nvtx:
                torch.cuda.profiler.stop()
        graphs = self._origins.graphs if self._origins else []
        if self._origins is not None:
            self._origins.close()
            self._origins = None
        if recorded is None:
            return None
        synchronize(self._device)
        if modules is None:
            # Kineto, once prepared, goes on until it was started and stopped.
            recorded.start_trace()
        notes = TraceNotes(1, self.steps, self._device.type, modules.classes if modules else {}, graphs)
        recorded.add_metadata_json(NOTES, json.dumps(msgspec.to_builtins(notes)))
        recorded.stop_trace()
        return _write(recorded, file) if self.steps else None


def _write(recorded: Any, path: Path) -> int:
    """The trace as a gzip file, whole or not at all; returns its size in bytes.

    Raises:
        OSError: it cannot be written, also where Kineto keeps to itself why.
    """
    path.parent.mkdir(exist_ok=True)
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
