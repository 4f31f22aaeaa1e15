"""Host memory does not grow with the number of recorded steps.

Python's own blocks are counted, which a single object kept a step would show; a leak in C would show in the process's
resident size.
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

# What a process's resident size does by itself: the allocator's arenas, pages of libraries touched late.
TOLERANCE_BYTES = 2 * 2**20
# An object kept a step is a block a step at least; steps that wait for their flush are a few dozen in all. torch 2.13's
# own `zero_grad` leaves one of 48 bytes, in its mark for the profiler.
MOST_BLOCKS = 1.5


class Nothing(LightningModule):
    """The cheapest step there is: one scalar weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        return self.weight * batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Growth(Callback):
    """Looks at this process after every step of the window, without keeping an object for it."""

    def __init__(self, session, steps):
        self._session, self._process = session, psutil.Process()
        self.blocks, self.resident_bytes = (array("q", bytes(8 * steps)) for _ in range(2))

    def on_train_batch_end(self, *_):
        if self._session.stage is Stage.WINDOW:
            self.blocks[self._session.window_steps] = sys.getallocatedblocks()
            self.resident_bytes[self._session.window_steps] = self._process.memory_info().rss


def test_a_training_with_collection_off_needs_no_more_memory(tmp_path, monkeypatch):
    """Lightning's own loop: neither it nor lmbench leaves cycles behind."""
    steps = 1_500
    timer, recorder = PhaseTimer(), RunRecorder(str(tmp_path))
    # Which would take 10 000 steps to fill.
    monkeypatch.setattr("lmbench.callbacks.session.KEPT_RECORDS", 100)
    # A window that was asked for: in one that has no end but training's, garbage is left to its collector.
    session = MeasurementSession(Schedule(warmup_steps=5, steps=steps))
    growth = Growth(session, steps)
    trainer = quiet_trainer(growth, timer, MemoryRecorder(), ThroughputMeter(), recorder, session)
    trainer.fit(Nothing(), itertools.repeat(torch.ones(())))
    assert (recorder.run.outcome, len((recorder.folder.path / "steps.jsonl").read_bytes().splitlines())) == ("ok", 1505)
    # From a fifth of the run on, after every buffer and ring is full, both stay. The lowest of some: records wait for
    # their flush.
    settled, some = steps // 5, FLUSH_STEPS + 10
    blocks = min(growth.blocks[-some:]) - min(growth.blocks[settled : settled + some])
    assert blocks / (steps - settled) < MOST_BLOCKS, f"{blocks} blocks in {steps} steps"
    resident_bytes = max(growth.resident_bytes[settled:]) - growth.resident_bytes[settled]
    assert resident_bytes < TOLERANCE_BYTES, f"{resident_bytes / 2**20:.1f} MiB in four fifths of {steps} steps"
