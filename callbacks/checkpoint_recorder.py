"""Records checkpoints that are saved in training, and the steps beside which they are written."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from lmbench.callbacks.observer import Observer


class CheckpointRecorder(Observer):
    """Records the size of checkpoints, when they are written, and which steps ran meanwhile.

    The PhaseTimer times how long a checkpoint blocks the training. Statistics of both are in the run's `saving`. A
    strategy that writes by itself, without the Trainer's CheckpointIO, tells nothing but that.

    Recorded:

    - `is_saving` of a step: whether a checkpoint was being written when it began.
    - `saving.checkpoint_bytes`, `saving.written_s`: size of the last checkpoint, and mean time to write one.
    """

    def prepare(self) -> None:
        self._path, self._written_s = Path(), list[float]()
        self._is_writing = self._was_writing = False

    def run_started(self) -> None:
        writer: Any = self.trainer.strategy.checkpoint_io
        while isinstance(writer, _WrappingCheckpointIO):
            writer = writer.checkpoint_io
        save = writer.save_checkpoint

        def write(checkpoint: Any, path: Any, *args: Any, **options: Any) -> None:
            began_s, self._is_writing = time.perf_counter(), True
            try:
                save(checkpoint, path, *args, **options)
            finally:
                self._is_writing = False
            self._path = Path(path)
            self._written_s.append(time.perf_counter() - began_s)

        self.undo.enter_context(patch.object(writer, "save_checkpoint", write))

    def step_ended(self) -> None:
        self.session.step.is_saving = self._was_writing or None
        self._was_writing = self._is_writing

    def run_closing(self, exception: BaseException | None) -> None:
        if self._written_s:
            files = [self._path, *self._path.rglob("*")]
            saving = self.run.saving
            saving.checkpoint_bytes = sum(file.stat().st_size for file in files if file.is_file()) or None
            saving.written_s = fmean(self._written_s)
