"""Records the dtypes of one step after the window, with the reason for each cast."""

from __future__ import annotations

from typing import Any

from lmbench.callbacks.events import Outputs
from lmbench.callbacks.tensor_witness import TensorWitness
from lmbench.dtypes.answer import DTYPES_FILE
from lmbench.dtypes.recording import StepDtypes
from lmbench.errors import error_line
from lmbench.instruments.compiling import is_compiled
from lmbench.instruments.training import loss_scale, loss_scaler
from lmbench.instruments.window import ProbeKind
from lmbench.records.codec import indented_json
from lmbench.records.examined import DtypeRecord


class DtypeRecorder(TensorWitness):
    """Records the dtypes of parameters, module inputs and outputs, logits, loss, gradients and optimizer state.

    A probe step after the window notes them, with the operators called and the reason for each cast: autocast's lists,
    the precision, or the code. The step runs uncompiled, because no hook sees into compiled code. In your own Trainer
    probe steps need `MeasurementSession(Schedule(steps=..., probe_steps=...))`.

    Rank 0 writes `dtypes.json` into the result folder, or into `default_root_dir` without a RunRecorder.

    Recorded under `dtypes`:

    - `tensors`: for each kind of tensor the number of tensors by dtype, and the reason.
    - `autocast_dtype`: autocast's lower precision; null where autocast is off.
    - `loss_scale`: factor on the loss; null without a gradient scaler.
    - `was_compiled`: whether the run was compiled, unlike this step.
    - `notes_file`: name of the file; null without one.
    - `reason`: why there are no dtypes; null where there are.
    """

    own_probes = (ProbeKind.DTYPES,)

    def prepare(self) -> None:
        self.notes: StepDtypes | None = None
        self._record = self.run.dtypes = DtypeRecord(reason="no probe step was taken to note them")

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind is not ProbeKind.DTYPES:
            return
        if not self.trainer.is_global_zero:
            self._record.reason = "only the first rank notes its dtypes"
            return
        self._record.reason = "the step whose dtypes were noted did not end"
        step = self.notes = StepDtypes(self.module, self.session.device)
        if loss_scaler(self.trainer) is not None and self.trainer.training:
            # Behind the step it may be another one.
            self._record.loss_scale = loss_scale(self.trainer)
        self._record.was_compiled = is_compiled(self.module)
        step.start(self.session.track.current)
        # Also after an exception: the hooks would stay in this process.
        self.undo.callback(step.stop)
        self.session.track.listen(step.border, self.undo)

    def batch_ended(self, outputs: Outputs, batch: Any) -> None:
        if self.notes is not None:
            self.notes.note_loss(outputs.get("loss"))

    def step_ended(self) -> None:
        step, record, trainer = self.notes, self._record, self.trainer
        if step is None:
            return
        self.notes = None
        self.undo.close()
        try:
            notes = step.fill_in(record, str(trainer.precision), str(self.run.mode), trainer.optimizers)
            (self.session.folder / DTYPES_FILE).write_text(indented_json(notes))
        except Exception as fault:
            # The window is complete, and its figures are worth keeping.
            record.reason = f"they could not be noted: {error_line(fault)[:150]}"
        else:
            record.reason, record.notes_file = None, DTYPES_FILE
