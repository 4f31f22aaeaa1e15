"""Records the history of the device's allocator over the window's first steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from lightning.pytorch import LightningModule, Trainer

from lmbench.callbacks.observer import Observer
from lmbench.errors import check_at_least
from lmbench.instruments.ranges import ModuleRanges, StepRanges
from lmbench.instruments.window import ProbeKind
from lmbench.memory.blocks import NOTES_FILE, SNAPSHOT_FILE, MemoryNotes
from lmbench.memory.recording import CudaHistory, Ledger
from lmbench.records.measured import MemoryHistoryRecord
from lmbench.records.vocabulary import Stage


class MemoryHistory(Observer):
    """The allocator's history of the window's first steps, with Python's stacks, for `lmbench memory`.

    Beside the snapshot it leaves notes, which say what addresses are: parameters, gradients, optimizer state, inputs,
    what autograd saved and by which operator, what modules returned. Steps, phases and modules are ranges in the
    history. All of that takes time: the run is no timing. Each step before the window is recorded too, and forgotten
    when it is over: of a run that an exception ends, such as a lack of memory, the last step's history is left.

    Args:
        steps: steps to record.
        max_entries: of the history; older ones are lost, which its reader says. A step of the 2.7B model has 15 000.
        make_history: makes the allocator's history from a device; by default PyTorch's, on a GPU.

    Writes `memory_snapshot.pickle` and `memory_notes.json` into the result folder (without a RunRecorder: into the
    trainer's `default_root_dir`), of several ranks those of the first. Leaves `memory_history.*`: `steps`,
    `max_entries`, `snapshot_file`, `snapshot_bytes`; `reason` where there is none.
    """

    def __init__(
        self, steps: int = 3, max_entries: int = 1_000_000, make_history: Callable[[torch.device], Any] | None = None
    ) -> None:
        check_at_least(1, steps=steps, max_entries=max_entries)
        self.steps, self.max_entries, self._make_history = steps, max_entries, make_history

    def prepare(self) -> None:
        self._history: Any = None
        #: What is to be taken away when the history ends.
        self._hooks = ExitStack()
        self._is_window = False
        self._record = self.session.run.memory_history = MemoryHistoryRecord(steps=0, max_entries=self.max_entries)

    def run_started(self) -> None:
        self._begin()

    def window_opened(self) -> None:
        self._end()
        self._is_window = True
        self._begin()

    def _begin(self) -> None:
        """Remember from here on, as far as there is a history on this device and rank."""
        device, module = self.session.device, self.module
        if self._make_history is None and device.type != "cuda":
            self._record.reason = "the allocator's history is a GPU's, and this run was on a CPU"
            return
        if not self.trainer.is_global_zero:
            self._record.reason = "only the first rank records its history"
            return
        self._notes = MemoryNotes(device=device.index or 0, max_entries=self.max_entries)
        self._history = (self._make_history or CudaHistory)(device)
        self._history.start(self.max_entries, resets_peaks=self._is_window)
        vocab_size = getattr(module, "vocab_size", None)
        self._ledger = Ledger(module, device, vocab_size if isinstance(vocab_size, int) else None)
        self._ledger.note_state(self.trainer.optimizers)
        self._ranges = StepRanges(uses_nvtx=False)
        self._hooks.callback(self._ledger.close)
        self._hooks.callback(self._ranges.end)
        # torch.compile would compile the hooks of modules too, in more graphs than without, so before the window they
        # are there only where nothing is compiled. Only lmbench's own runs know.
        is_eager = self.session.run.compile.is_enabled is False and not any(
            getattr(child, "_compiled_call_impl", None) is not None for child in module.modules()
        )
        if self._is_window or is_eager:
            self._ledger.watch()
            self._hooks.callback(ModuleRanges(module, uses_nvtx=False).remove)
        self._ranges.begin(self.session.steps_done, self.session.track.current)
        self.session.track.listeners.append(self._ranges.border)
        self._hooks.callback(self.session.track.unlisten, self._ranges.border)

    # Lightning's hooks

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._history is not None:
            self._ledger.note_inputs(batch)
            self._ledger.watch_saving()

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: int) -> None:
        if self._history is not None and trainer.state.fn != "fit":
            self._ledger.note_inputs(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if self._history is not None:
            self._ledger.note_saved(loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._history is not None:
            self._ledger.note_state()

    # the session's

    def step_ended(self, stage: Stage, kind: ProbeKind | None) -> None:
        if self._history is None:
            return
        if not self._is_window:
            self._end()
            self._begin()
            return
        self._ledger.note_state(self.trainer.optimizers)
        self._ranges.end()
        self._record.steps = self._notes.steps = self._notes.steps + 1
        if self._notes.steps < self.steps:
            self._ranges.begin(self.session.steps_done, self.session.track.current)
        elif self.session.only_watches:
            self._end(is_kept=True)

    def window_closed(self) -> None:
        self._end(is_kept=True)

    def run_closing(self, exception: BaseException | None) -> None:
        """Also after an exception: the history would go on in this process."""
        try:
            if exception is not None and self._history is not None:
                # Its traceback keeps what was there.
                self._ledger.note_saved(None)
                self._ledger.note_state(self.trainer.optimizers)
                self._record.steps = self._notes.steps = self._notes.steps + self._ranges.is_in_step
        finally:
            self._end(is_kept=exception is not None or self._is_window)

    def _end(self, is_kept: bool = False) -> None:
        """Put an end to the history, if there is one, and write it where it is kept."""
        history, self._history = self._history, None
        if history is None:
            return
        try:
            self._hooks.close()
            if is_kept:
                # Before the window there are other steps' peaks in them.
                self._notes.peaks = history.peaks() if self._is_window else None
                history.drop_workspaces()
                self._notes.moments = self._ledger.moments
                folder = self.session.folder
                self._record.snapshot_bytes = history.write(folder / SNAPSHOT_FILE)
                (folder / NOTES_FILE).write_bytes(msgspec.json.encode(self._notes))
                self._record.snapshot_file = SNAPSHOT_FILE
        except OSError as error:
            self._record.reason = f"the snapshot could not be written: {error.strerror or error}"
        finally:
            history.stop()
