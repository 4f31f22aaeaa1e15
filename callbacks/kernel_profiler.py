"""The kernel profiler as a Trainer flag."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch.profilers import PassThroughProfiler

from lmbench.callbacks.kernel_capture import KernelCapture
from lmbench.callbacks.session import MeasurementSession
from lmbench.errors import UsageError
from lmbench.kernels.recording.trace import Tool


class KernelProfiler(PassThroughProfiler):
    """Records the kernels of a few steps after the warm-up, for `lmbench kernels`.

    `--trainer.profiler kernels` in short. The recorded steps are the run's window, whatever `measure.steps` and
    `measure.min_window_s` say, and the run is marked: its step times enter no timing table. Recording starts and ends
    on an idle device, outside the steps. The trace has ranges for steps, phases and modules, see `KernelCapture`.

    Args:
        steps: steps to record.
        tool: torch records `trace.json.gz`; nsys only sets NVTX ranges, and `cudaProfilerStart` and `Stop` around the
            steps, for a run under `lmbench nsys`.
    """

    def __init__(self, steps: int = 3, tool: Tool = "torch") -> None:
        super().__init__()
        if steps < 1:
            raise UsageError(f"the KernelProfiler's steps are {steps}; allowed: 1 and more")
        if tool not in ("torch", "nsys"):
            raise UsageError(f"the KernelProfiler's tool is {tool!r}; allowed: torch, nsys")
        self.steps = steps
        self.tool = tool
        # Lightning's profilers without a file name report to a stream.
        self.filename = None

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Lightning calls this before the callbacks' `setup`, with the module in its hand."""
        module: Any = getattr(self, "_lightning_module")  # noqa: B009 - Lightning sets it, and declares it nowhere
        trainer: Any = module.trainer
        capture = KernelCapture(self.steps, self.tool)
        # In front, so that starting and stopping lies outside of what the timer sees.
        trainer.callbacks = [capture, *(c for c in trainer.callbacks if not isinstance(c, KernelCapture))]
        for session in trainer.callbacks:
            if isinstance(session, MeasurementSession) and not session.only_watches:
                session.schedule = replace(session.schedule, steps=self.steps, min_window_s=0.0)
