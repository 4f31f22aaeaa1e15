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
        writes_trace: of several ranks only one does.

    From its making until `close`, it listens to what Inductor compiles.
    """

    def __init__(self, module: nn.Module, device: torch.device, tool: Tool, writes_trace: bool) -> None:
        self.steps = 0
        self._module, self._device = module, device
        self._uses_nvtx = device.type == "cuda"
        self._marks_for_nsight = tool == "nsys" and self._uses_nvtx
        self._trace: TorchTrace | None = None
        self._origins: GraphOrigins | None = None
        if tool == "torch" and writes_trace:
            self._origins = GraphOrigins()
            self._origins.listen()
            self._trace = TorchTrace(device)
        self._ranges = StepRanges(self._uses_nvtx)
        self._modules: ModuleRanges | None = None
        self._is_nsight_recording = False

    @property
    def is_in_step(self) -> bool:
        return self._ranges.is_in_step

    def prepare(self) -> None:
        """Switch the instruments on, before the last step that is not recorded. Raises UsageError, see TorchTrace."""
        if self._trace is not None and not self._trace.is_prepared:
            self._trace.prepare()

    def start(self) -> None:
        """Begin, on an idle device and outside of steps."""
        self._modules = ModuleRanges(self._module, self._uses_nvtx)
        if self._trace is not None:
            self._trace.start()
        elif self._marks_for_nsight:
            torch.cuda.profiler.start()
            self._is_nsight_recording = True

    def begin_step(self, step: int, phase: str) -> None:
        """A step begins, in `phase`."""
        self._ranges.begin(step, phase)

    def border(self, phase: str) -> None:
        """Within a step a phase begins; the one before ends."""
        self._ranges.border(phase)

    def end_step(self) -> None:
        """A whole step is over."""
        self._ranges.end()
        self.steps += 1

    def stop(self, file: Path) -> int | None:
        """Stop, whatever state it is in, and write the trace; returns its size in bytes, None where there is none.

        May be called again. Raises OSError where the trace cannot be written.
        """
        self._ranges.end()
        classes: dict[str, str] = {}
        if self._modules is not None:
            self._modules.remove()
            classes, self._modules = self._modules.classes, None
        if self._is_nsight_recording:
            torch.cuda.profiler.stop()
            self._is_nsight_recording = False
        trace, self._trace = self._trace, None
        if trace is None or not trace.is_prepared:
            return None
        synchronize(self._device)
        graphs = self._origins.graphs if self._origins else []
        trace.stop(TraceNotes(1, self.steps, self._device.type, classes, graphs))
        return trace.write(file) if self.steps else None

    def close(self) -> None:
        """Listen to Inductor no longer."""
        if self._origins is not None:
            self._origins.close()
            self._origins = None


class TorchTrace:
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

    def stop(self, notes: TraceNotes) -> None:
        """Stop, once prepared; the notes go into the trace."""
        if not self._is_started:
            # Kineto, once prepared, goes on until it was started and stopped.
            self._profile.start_trace()
        self._is_started = False
        self._profile.add_metadata_json(NOTES, json.dumps(msgspec.to_builtins(notes)))
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
