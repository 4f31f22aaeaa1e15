"""Records the history of the device's memory allocator over the window's first steps."""

from __future__ import annotations

import msgspec
from torch.autograd.profiler import record_function

from lmbench.callbacks.tensor_witness import TensorWitness
from lmbench.errors import check_at_least
from lmbench.instruments.compiling import is_compiled
from lmbench.instruments.ranges import ModuleRanges, StepRanges
from lmbench.memory.blocks import NOTES_FILE, SNAPSHOT_FILE, WORKSPACES, CountedPeaks, MemoryNotes
from lmbench.memory.recording import Ledger
from lmbench.records.examined import MemoryHistoryRecord


class MemoryHistory(TensorWitness):
    """Records the allocator's history of the window's first steps, with Python stacks, for `lmbench memory`.

    Notes beside the snapshot say what each address holds: a parameter, a gradient, optimizer state, an input, a tensor
    that autograd saved for some operator, or a module's output. Steps, phases and modules are ranges in the history.
    Recording slows the steps, so their times are no measurement. Each step before the window is recorded too, and
    forgotten when it ends: if the run fails, for lack of memory say, the history of its last step is kept.

    Rank 0 writes `memory_snapshot.pickle` and `memory_notes.json` into the result folder, or into `default_root_dir`
    without a RunRecorder.

    Recorded under `memory_history`:

    - `steps`: number of recorded steps.
    - `snapshot_file`: name of the snapshot.
    - `reason`: why there is no history; null where there is one.

    Args:
        steps: steps to record.
        max_entries: capacity of the history; older entries are lost, and `lmbench memory` says so. A step of the 2.7B
            model has 15 000 entries.

    Raises:
        UsageError: `steps` or `max_entries` is below 1.
    """

    def __init__(self, steps: int = 3, max_entries: int = 1_000_000) -> None:
        check_at_least(1, "memory", steps=steps, max_entries=max_entries)
        self.steps, self.max_entries = steps, max_entries

    def prepare(self) -> None:
        self.notes: Ledger | None = None
        self._is_window = False
        self._record = self.run.memory_history = MemoryHistoryRecord(steps=0)

    def run_started(self) -> None:
        self._begin()

    def window_opened(self) -> None:
        self._is_window = True
        self._begin()

    def _begin(self) -> None:
        """Start a history in place of the running one, if this device and rank can have one."""
        self._end()
        device, module, history = self.session.device, self.module, self.device.history()
        if history is None:
            self._record.reason = f"PyTorch keeps no history of an allocator on a {device.type.upper()}"
            return
        if not self.trainer.is_global_zero:
            self._record.reason = "only the first rank records its history"
            return
        self._file = MemoryNotes(device=device.index or 0, max_entries=self.max_entries)
        self._history = history
        history.start(self.max_entries, resets_peaks=self._is_window)
        vocab_size = getattr(module, "vocab_size", None)
        notes = self.notes = Ledger(module, device, vocab_size if isinstance(vocab_size, int) else None)
        notes.note_state(self.trainer.optimizers)
        self._ranges = StepRanges(self.session.track)
        self.undo.callback(notes.close)
        self.undo.callback(self._ranges.end)
        # torch.compile would compile module hooks too, into more graphs. So hook before the window only where nothing
        # is compiled. Only runs of lmbench's own record that (`compile.is_enabled`).
        is_eager = self.run.compile.is_enabled is False and not is_compiled(module)
        if self._is_window or is_eager:
            notes.watch()
            self.undo.callback(ModuleRanges(module).remove)
        self._ranges.begin(self.session.steps_done)
        self._ranges.follow(self.undo)

    def step_ended(self) -> None:
        if self.notes is None:
            return
        if not self._is_window:
            self._begin()
            return
        self.notes.note_state(self.trainer.optimizers)
        self._ranges.end()
        self._record.steps = self._file.steps = self._file.steps + 1
        if self._file.steps < self.steps:
            self._ranges.begin(self.session.steps_done)
        elif self.session.only_watches:
            self._end(is_kept=True)

    def window_closed(self) -> None:
        self._end(is_kept=True)

    def run_closing(self, exception: BaseException | None) -> None:
        """Stop the history, also after an exception: it would go on in this process."""
        try:
            if exception is not None and self.notes is not None:
                # The exception's traceback still holds the tensors of the step.
                self.notes.note_loss(None)
                self.notes.note_state(self.trainer.optimizers)
                self._record.steps = self._file.steps = self._file.steps + self._ranges.is_in_step
        finally:
            self._end(is_kept=exception is not None or self._is_window)

    def _end(self, is_kept: bool = False) -> None:
        """End the running history, if any; write it if `is_kept`."""
        notes, self.notes = self.notes, None
        if notes is None:
            return
        try:
            # Removes the hooks and closes the ranges.
            self.undo.close()
            if is_kept:
                # Before the window the peaks cover other steps too.
                self._file.peaks = CountedPeaks(*self._history.peaks()) if self._is_window else None
                with record_function(WORKSPACES):
                    self._history.drop_workspaces()
                self._file.moments = notes.moments
                folder = self.session.folder
                self._history.write(folder / SNAPSHOT_FILE)
                (folder / NOTES_FILE).write_bytes(msgspec.json.encode(self._file))
                self._record.snapshot_file = SNAPSHOT_FILE
        except OSError as error:
            self._record.reason = f"the snapshot could not be written: {error.strerror or error}"
        finally:
            self._history.stop()
