"""Notes the dtype of everything in one step after the window, with the reason for each cast."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lmbench.callbacks.observer import Observer
from lmbench.dtypes.answer import DTYPES_FILE
from lmbench.dtypes.recording import StepDtypes
from lmbench.instruments.training import loss_scaler
from lmbench.instruments.window import ProbeKind
from lmbench.records.codec import indented_json
from lmbench.records.measured import DtypeRecord
from lmbench.records.vocabulary import Stage


class DtypeRecorder(Observer):
    """Dtypes of parameters, of what every module gets and returns, of logits, loss, gradients and optimizer state.

    They are noted in one probe step of its own, after the window, with the operators that the code called and the
    reason for each cast: autocast's lists, the precision, or the code. That step runs without compiled code, into which
    no hook sees. A Trainer of your own has probe steps only with
    `MeasurementSession(Schedule(steps=..., probe_steps=...))`.

    Writes `dtypes.json` into the result folder (without a RunRecorder: into the trainer's `default_root_dir`), of
    several ranks those of the first. Leaves `dtypes.*`: `tensors`, `unused_modules`, `autocast_dtype`, `loss_scale`,
    `was_compiled`, `notes_file`; `reason` where there are none.
    """

    own_probes = (ProbeKind.DTYPES,)

    def prepare(self) -> None:
        #: The step whose dtypes are noted, while it runs.
        self._step: StepDtypes | None = None
        self._record = self.session.run.dtypes = DtypeRecord(reason="no probe step was taken to note them")

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind is not ProbeKind.DTYPES:
            return
        if not self.trainer.is_global_zero:
            self._record.reason = "only the first rank notes its dtypes"
            return
        self._step = StepDtypes(self.module, self.session.device)
        self._record.was_compiled = self._step.is_compiled
        self._step.start(self.session.track.current)
        self.session.track.listeners.append(self._step.border)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        if self._step is not None:
            self._step.note_batch(batch)

    on_validation_batch_start = on_train_batch_start  # type: ignore[assignment]

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._step is not None:
            self._step.note_loss(loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._step is not None:
            scaler = loss_scaler(trainer)
            self._record.loss_scale = scaler.get_scale() if scaler is not None else None
            self._step.note_gradients()

    def batch_ended(self, outputs: Any, batch: Any) -> None:
        if self._step is not None:
            self._step.note_loss(outputs)

    def step_ended(self, stage: Stage, kind: ProbeKind | None) -> None:
        step, record, trainer = self._take_away(), self._record, self.trainer
        if step is None:
            return
        mode = self.session.run.mode or ("train_step" if trainer.state.fn == "fit" else "inference")
        try:
            notes = step.fill_in(record, str(trainer.precision), mode, trainer.optimizers)
            (self.session.folder / DTYPES_FILE).write_text(indented_json(notes))
        except Exception as fault:
            # The window is complete: its figures are not lost for this.
            why = " ".join(str(fault).split())[:120]
            record.reason = f"they could not be noted: {type(fault).__name__}: {why}"
        else:
            record.reason, record.notes_file = None, DTYPES_FILE

    def run_closing(self, exception: BaseException | None) -> None:
        """Also after an exception: hooks would stay in this process."""
        if self._take_away() is not None:
            self._record.reason = "the step whose dtypes were noted did not end"

    def _take_away(self) -> StepDtypes | None:
        step, self._step = self._step, None
        if step is not None:
            self.session.track.unlisten(step.border)
            step.stop()
        return step
