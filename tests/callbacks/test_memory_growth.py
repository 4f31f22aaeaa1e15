"""Host memory does not grow with the number of recorded steps.

The number of Python's memory blocks would show one object kept a step; the process's resident size would show a leak
in C.
"""

from __future__ import annotations

import itertools
import sys
from array import array

import psutil
import torch
from lightning.pytorch import Callback, LightningModule

from lmbench.callbacks import (
    MeasurementSession,
    MemoryRecorder,
    PhaseTimer,
    RunRecorder,
    ThroughputMeter,
)
from lmbench.callbacks.phase_timer import FLUSH_STEPS
from lmbench.instruments.window import Schedule
from lmbench.records.vocabulary import Stage

from conftest import quiet_trainer

# Resident size grows by this much without a leak: the allocator's arenas, and pages of libraries that are touched late.
TOLERANCE_BYTES = 2 * 2**20
# One object kept a step is at least one block a step; steps waiting for their flush are a few dozen in all. The
# `zero_grad` of torch 2.13 itself leaves a block of 48 bytes a step, in its mark for the profiler.
MOST_BLOCKS = 1.5


class Nothing(LightningModule):
    """The cheapest possible step: one scalar weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        return self.weight * batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Growth(Callback):
    """Notes the memory of this process after every step of the window, without keeping an object a step."""

    def __init__(self, session, steps):
        self._session, self._process = session, psutil.Process()
        self.blocks, self.resident_bytes = (array("q", bytes(8 * steps)) for _ in range(2))

    def on_train_batch_end(self, *_):
        if self._session.stage is Stage.WINDOW:
            self.blocks[self._session.window_steps] = sys.getallocatedblocks()
            self.resident_bytes[self._session.window_steps] = self._process.memory_info().rss


def test_a_training_with_collection_off_needs_no_more_memory(tmp_path, monkeypatch):
    """Neither Lightning's loop nor lmbench leaves reference cycles behind."""
    steps = 1_500
    timer, recorder = PhaseTimer(), RunRecorder(str(tmp_path))
    # Filling the default size would take 10 000 steps.
    monkeypatch.setattr("lmbench.callbacks.session.KEPT_RECORDS", 100)
    # Ask for a number of steps: in a window that lasts until training ends, garbage collection stays on.
    session = MeasurementSession(Schedule(warmup_steps=5, steps=steps))
    growth = Growth(session, steps)
    trainer = quiet_trainer(growth, timer, MemoryRecorder(), ThroughputMeter(), recorder, session)
    trainer.fit(Nothing(), itertools.repeat(torch.ones(())))
    assert (recorder.run.outcome, len((recorder.folder.path / "steps.jsonl").read_bytes().splitlines())) == ("ok", 1505)
    # After a fifth of the run every buffer and ring is full, and both stay constant. Compare minima over some steps,
    # because records wait for their flush.
    settled, some = steps // 5, FLUSH_STEPS + 10
    blocks = min(growth.blocks[-some:]) - min(growth.blocks[settled : settled + some])
    assert blocks / (steps - settled) < MOST_BLOCKS, f"{blocks} blocks in {steps} steps"
    resident_bytes = max(growth.resident_bytes[settled:]) - growth.resident_bytes[settled]
    assert resident_bytes < TOLERANCE_BYTES, f"{resident_bytes / 2**20:.1f} MiB in four fifths of {steps} steps"
