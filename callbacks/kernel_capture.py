"""Records a trace of the window's first steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer

from lmbench.callbacks.observer import Observer
from lmbench.callbacks.run_recorder import RunRecorder
from lmbench.kernels.recording.graph_origins import GraphOrigins
from lmbench.kernels.recording.kineto import Recording
from lmbench.kernels.recording.ranges import ModuleRanges, StepRanges
from lmbench.kernels.trace.recorded import TRACE_FILE
from lmbench.measure.clock import synchronize
from lmbench.measure.schedule import ProbeKind
from lmbench.records.run import Profile
from lmbench.records.vocabulary import Stage


class KernelCapture(Observer):
    """A trace of the window's first steps, with ranges that tile them.

    Ranges: `lmbench.step:<step>`, in it `lmbench.phase:<phase>` one after the other, and `lmbench.module:<path>` around
    each module's forward. Backward runs on a thread of autograd's; the phase's range encloses it in time.

    Args:
        steps: steps to record.
        tool: `torch` writes `trace.json.gz` into the result folder (without a RunRecorder: into the trainer's
            `default_root_dir`), of several ranks that of the first; `nsys` leaves recording to Nsight Systems.

    Leaves `profile.*`: `tool`, `steps`, `first_step`, `trace_file`, `trace_bytes`; `trace_error` where the trace could
    not be written.
    """

    def __init__(self, steps: int = 3, tool: Literal["torch", "nsys"] = "torch") -> None:
        self.steps = steps
        self.tool = tool
        self._recording: Recording | None = None
        self._origins: GraphOrigins | None = None
        self._ranges: StepRanges | None = None
        self._modules: ModuleRanges | None = None
        self._is_nsys_capturing = False
        self._recorded = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._trainer, self._module = trainer, pl_module
        self._recorded = 0

    def run_started(self) -> None:
        self.session.run.profile = Profile(tool=self.tool, steps=0)
        if self.tool == "torch" and self._trainer.is_global_zero:
            self._origins = GraphOrigins()
            self._origins.listen()
            self._recording = Recording(self.session.device)
            self._prepare()

    def step_ended(self, stage: Stage, kind: ProbeKind | None) -> None:
        if stage is Stage.WARMUP:
            self._prepare()
        elif self._ranges is not None:
            self._recorded += 1
            if self._recorded < self.steps:
                self._ranges.begin(self.session.steps_done, self.session.track.current)
                return
            self._end_ranges()
            if self.session.only_watches:
                # In a stranger's Trainer the window goes on; stopping waits for the device and belongs between steps.
                self._stop()

    def _prepare(self) -> None:
        """Switch the instruments on for the last step before the window."""
        is_last = self.session.steps_done >= self.session.schedule.warmup_steps - 1
        if is_last and self._recording is not None and not self._recording.is_prepared:
            self._recording.prepare()

    def window_opened(self) -> None:
        uses_nvtx = self.session.device.type == "cuda"
        if self.session.run.profile is not None:
            self.session.run.profile.first_step = self.session.steps_done
        self._modules = ModuleRanges(self._module, uses_nvtx)
        if self._recording is not None:
            self._recording.start()
        elif self.tool == "nsys" and uses_nvtx:
            torch.cuda.profiler.start()
            self._is_nsys_capturing = True
        self._ranges = StepRanges(uses_nvtx)
        self._ranges.begin(self.session.steps_done, self.session.track.current)
        self.session.track.listeners.append(self._ranges.border)

    def window_closed(self) -> None:
        self._stop()

    def run_closing(self, exception: BaseException | None) -> None:
        """Also after an exception: an unfinished recording would go on in this process."""
        self._stop()
        if self._origins is not None:
            self._origins.close()
            self._origins = None

    def _end_ranges(self) -> None:
        if self._ranges is not None:
            if self._ranges.border in self.session.track.listeners:
                self.session.track.listeners.remove(self._ranges.border)
            self._ranges.end()
            self._ranges = None

    def _stop(self) -> None:
        self._end_ranges()
        classes: dict[str, str] = {}
        if self._modules is not None:
            self._modules.remove()
            classes, self._modules = self._modules.classes, None
        facts = self.session.run.profile or Profile()
        facts.steps = self._recorded
        recording, self._recording = self._recording, None
        if self._is_nsys_capturing:
            torch.cuda.profiler.stop()
            self._is_nsys_capturing = False
        if recording is None or not recording.is_prepared:
            return
        synchronize(self.session.device)
        recording.stop(self._metadata(classes))
        if self._recorded:
            try:
                facts.trace_bytes = recording.write(self._folder() / TRACE_FILE)
                facts.trace_file = TRACE_FILE
            except OSError as error:
                facts.trace_error = error.strerror or str(error)

    def _metadata(self, classes: dict[str, str]) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "steps": self._recorded,
            "device_type": self.session.device.type,
            "module_classes": classes,
            "compiled_graphs": self._origins.graphs if self._origins else [],
        }

    def _folder(self) -> Path:
        for observer in self.session.observers:
            if isinstance(observer, RunRecorder) and observer.folder is not None:
                return observer.folder.path
        return Path(self._trainer.default_root_dir)
