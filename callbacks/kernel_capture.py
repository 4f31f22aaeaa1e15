"""Records a kernel trace of the window's first steps, as a callback and as a Trainer flag."""

from __future__ import annotations

from dataclasses import replace

from lightning.pytorch.profilers import PassThroughProfiler

from lmbench.callbacks.host_step import HostStep
from lmbench.callbacks.observer import Observer
from lmbench.callbacks.session import MeasurementSession
from lmbench.errors import check_at_least
from lmbench.kernels.recording.trace import Recording, Tool
from lmbench.kernels.trace_notes import TRACE_FILE
from lmbench.records.run import Profile
from lmbench.records.vocabulary import Stage


class KernelCapture(Observer):
    """Records a trace of the window's first steps, with ranges for steps, phases and modules.

    A range `lmbench.step:<step>` holds one `lmbench.phase:<phase>` after the other. `lmbench.module:<path>` surrounds
    each module's forward. On a GPU autograd runs the backward on another thread, within the time of the phase's range.

    Recorded under `profile`:

    - `tool`: as given.
    - `steps`, `first_step`: number of traced steps and index of the first.
    - `trace_file`, `trace_bytes`: name and size of the trace.
    - `trace_error`: why the trace could not be written; null where it was.

    Args:
        steps: steps to record.
        tool: `torch` writes `trace.json.gz` into the result folder. Without a RunRecorder that is `default_root_dir`,
            and `rank1`, ... in it for further ranks. `nsys` leaves recording to Nsight Systems.
        with_stack: record calls of Python functions too.
    """

    def __init__(self, steps: int = 3, tool: Tool = "torch", with_stack: bool = False) -> None:
        self.steps, self.tool, self.with_stack = steps, tool, with_stack

    def run_started(self) -> None:
        self._profile = self.run.profile = self.run.profile or Profile()
        self._profile.tool, self._profile.steps = self.tool, 0
        self._recording = Recording(self.module, self.device, self.session.track, self.tool, self.with_stack)
        # Also after an exception: the recording would go on in this process.
        self.undo.callback(self._stop)
        self._warm_up()

    def step_ended(self) -> None:
        if self.session.stage is Stage.WARMUP:
            self._warm_up()
        elif self._recording.ranges.is_in_step:
            self._recording.end_step()
            if self._recording.steps < self.steps:
                self._recording.ranges.begin(self.session.steps_done)
            elif self.session.only_watches:
                # This window lasts until training ends. Stopping waits for the device, so stop between two steps.
                self.undo.close()

    def _warm_up(self) -> None:
        """Start the profiler's own warm-up for the last step before the window."""
        if self.session.steps_done >= self.session.schedule.warmup_steps - 1:
            self._recording.prepare()

    def window_opened(self) -> None:
        self._profile.first_step = self.session.steps_done
        self._recording.start()
        self._recording.ranges.begin(self.session.steps_done)
        self._recording.ranges.follow(self.undo)

    def window_closed(self) -> None:
        self.undo.close()

    def _stop(self) -> None:
        self._profile.steps = self._recording.steps
        try:
            size_bytes = self._recording.stop(self.session.folder / TRACE_FILE)
        except OSError as error:
            self._profile.trace_error = error.strerror or str(error)
            return
        if size_bytes is not None:
            self._profile.trace_bytes, self._profile.trace_file = size_bytes, TRACE_FILE


class KernelProfiler(PassThroughProfiler):
    """Records the kernels of a few steps after the warm-up, for `lmbench kernels`.

    `--trainer.profiler kernels` is the short form. The recorded steps are the run's window, whatever `measure.steps`
    and `measure.min_window_s` say. The run is marked as profiled, so its step times enter no timing table. Recording
    starts and ends on an idle device, outside the steps. `KernelCapture` documents the ranges in the trace.

    Args:
        steps: steps to record.
        tool: torch records `trace.json.gz`; nsys only sets NVTX ranges, and `cudaProfilerStart` and `Stop` around the
            steps, for a run under `lmbench nsys`.
        with_stack: record calls of Python functions too, so that time of the host beside operators has a name. It
            slows the host further.

    Raises:
        UsageError: `steps` is below 1.
    """

    def __init__(self, steps: int = 3, tool: Tool = "torch", with_stack: bool = False) -> None:
        super().__init__()
        check_at_least(1, "trainer.profiler", steps=steps)
        self._capture = KernelCapture(steps, tool, with_stack)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Add a HostStep and a KernelCapture to the Trainer, and make the recorded steps the window.

        Lightning calls this before the callbacks' `setup`.
        """
        module = getattr(self, "_lightning_module")  # noqa: B009 - Lightning sets it, and declares it nowhere
        trainer = module.trainer
        added = [HostStep(), self._capture]
        # In front of the timer, so that starting and stopping the recording is not in its times.
        trainer.callbacks = [*added, *(c for c in trainer.callbacks if not isinstance(c, HostStep | KernelCapture))]
        for session in trainer.callbacks:
            if isinstance(session, MeasurementSession) and not session.only_watches:
                session.schedule = replace(session.schedule, steps=self._capture.steps, min_window_s=0.0)
