"""Notes the dtype of everything in one step after the window, with the reason for each cast."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lmbench.callbacks.observer import Observer
from lmbench.callbacks.run_recorder import result_folder
from lmbench.dtypes.recorded import DTYPES_FILE, write_notes
from lmbench.dtypes.recording.step import StepDtypes
from lmbench.instruments.schedule import ProbeKind
from lmbench.instruments.training import loss_scaler
from lmbench.records.instruments import DtypeRecord
from lmbench.records.vocabulary import Stage

_HOOKS = (
    "on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward",
    "on_validation_batch_start", "on_validation_batch_end",
)  # fmt: skip


class DtypeRecorder(Observer):
    """Dtypes of parameters, of what every module gets and returns, of logits, loss, gradients and optimizer state.

    They are noted in one probe step of its own, after the window, with the operators that were called and what autocast
    made of their inputs; in which of autocast's lists an operator is, this PyTorch is asked, on the run's device. That
    step runs without compiled code, into which no hook sees. A Trainer of your own has probe steps only with
    `MeasurementSession(Schedule(steps=..., probe_steps=...))`.

    Writes `dtypes.json` into the result folder (without a RunRecorder: into the trainer's `default_root_dir`), of
    several ranks those of the first. Leaves `dtypes.*`: `tensors`, `unused_modules`, `autocast_dtype`, `loss_scale`,
    `was_compiled`, `notes_file`; `reason` where there are none.
    """

    own_probes = (ProbeKind.DTYPES,)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._trainer, self._module = trainer, pl_module
        self._step: StepDtypes | None = None
        for hook in _HOOKS:
            # Lightning skips a hook that is None: in the window there is nothing to note.
            setattr(self, hook, None)
        self._record = self.session.run.dtypes = DtypeRecord(reason="no probe step was taken to note them")

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind is not ProbeKind.DTYPES:
            return
        if not self._trainer.is_global_zero:
            self._record.reason = "only the first rank notes its dtypes"
            return
        for hook in _HOOKS:
            delattr(self, hook)
        self._step = StepDtypes(self._module, self.session.device)
        self._record.was_compiled = self._step.is_compiled
        try:
            self._step.start(self.session.steps_done, self.session.track.current)
        except RuntimeError as error:
            # PyTorch has one profiler in a process.
            self._step = None
            self._record.reason = f"operators cannot be seen: {' '.join(str(error).split())[:120]}"
            return
        self.session.track.listeners.append(self._step.border)

    # Lightning's hooks

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._step is not None:
            self._step.note_batch(batch)

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: int) -> None:
        if trainer.state.fn != "fit":
            self.on_train_batch_start(trainer, pl_module, batch, 0)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._step is not None:
            self._step.note_loss(loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._step is not None:
            scaler = loss_scaler(trainer)
            self._record.loss_scale = scaler.get_scale() if scaler is not None else None
            self._step.note_gradients()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._step is not None:
            self._step.note_loss(outputs)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        if trainer.state.fn != "fit":
            self.on_train_batch_end(trainer, pl_module, outputs, None, 0)

    # the session's

    def step_ended(self, stage: Stage, kind: ProbeKind | None) -> None:
        if self._step is None:
            return
        step = self._take_away()
        trainer, record = self._trainer, self._record
        mode = self.session.run.mode or ("train_step" if trainer.state.fn == "fit" else "inference")
        try:
            found = step.findings(str(trainer.precision), mode, record.loss_scale, trainer.optimizers)
        except Exception as fault:
            # The window is complete: its figures are not lost for this.
            why = " ".join(str(fault).split())[:120]
            record.reason = f"they could not be put together: {type(fault).__name__}: {why}"
            return
        record.autocast_dtype, record.tensors = found.autocast_dtype, found.tensors
        record.unused_modules = found.unused_modules
        record.reason = None
        try:
            write_notes(found.notes, result_folder(self._trainer, self.session.observers))
        except OSError as error:
            record.reason = f"{DTYPES_FILE} could not be written: {error.strerror or error}"
        else:
            record.notes_file = DTYPES_FILE

    def run_closing(self, exception: BaseException | None) -> None:
        """Also after an exception: hooks and a profiler would stay in this process."""
        if self._step is not None:
            self._take_away()
            self._record.reason = "the step whose dtypes were noted did not end"

    def _take_away(self) -> StepDtypes:
        step, self._step = self._step, None
        assert step is not None
        if step.border in self.session.track.listeners:
            self.session.track.listeners.remove(step.border)
        step.stop()
        return step
