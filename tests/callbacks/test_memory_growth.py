"""Host memory does not grow with the number of recorded steps.

Python's own blocks are counted, which a single object kept a step would show; a leak in C would show in the process's
resident size.
"""

from __future__ import annotations

import gc
import sys
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lmbench.callbacks import (
    MeasurementSession,
    MemoryRecorder,
    PhaseTimer,
    QuietHost,
    RunRecorder,
    ThroughputMeter,
)
from lmbench.callbacks.phase_timer import FLUSH_STEPS
from lmbench.instruments.schedule import Schedule
from lmbench.records.vocabulary import Stage

from conftest import QUIET

# What a process's resident size does by itself: the allocator's arenas, pages of libraries touched late.
TOLERANCE_BYTES = 2 * 2**20
# An object kept a step is a block a step at least; steps that wait for their flush are a few dozen in all.
NOTHING_BLOCKS = 0.1
# torch 2.13's own `zero_grad` leaves one of 48 bytes, in its mark for the profiler.
TORCHS_OWN_BLOCKS = 1
WARMUP_STEPS = 5

# Lightning's profiler actions of one training step, as far as they bound a phase, with its callbacks' in between.
ACTIONS = (
    ("[_TrainingEpochLoop].train_dataloader_next",),
    ("[Strategy]SingleDeviceStrategy.batch_to_device",),
    ("[Callback]PhaseTimer.on_train_batch_start",),
    ("[LightningModule]Nothing.optimizer_step", "[Strategy]SingleDeviceStrategy.training_step"),
    ("[LightningModule]Nothing.optimizer_step", "[LightningModule]Nothing.optimizer_zero_grad"),
    ("[LightningModule]Nothing.optimizer_step", "[Strategy]SingleDeviceStrategy.backward"),
    ("[LightningModule]Nothing.optimizer_step", "[LightningModule]Nothing.configure_gradient_clipping"),
)


class Nothing(LightningModule):
    """The cheapest step there is: one scalar weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight * batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Endless:
    def __iter__(self) -> Iterator[Tensor]:
        batch = torch.ones(())
        while True:
            yield batch


class Growth:
    """Looks at this process after every step, without keeping an object for it."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._blocks, self._resident_bytes = (array("q", bytes(8 * steps)) for _ in range(2))
        self._process = psutil.Process()
        self._looks = 0

    def look(self) -> None:
        self._blocks[self._looks] = sys.getallocatedblocks()
        self._resident_bytes[self._looks] = self._process.memory_info().rss
        self._looks += 1

    def assert_none(self, allowed_blocks: float = NOTHING_BLOCKS) -> None:
        """From a fifth of the run on, after every buffer and ring is full, both stay."""
        settled = self._steps // 5
        # The lowest of some: records wait for their flush.
        parts = self._blocks[settled : settled + FLUSH_STEPS + 10], self._blocks[-FLUSH_STEPS - 10 :]
        first, last = map(min, parts)
        assert (last - first) / (self._steps - settled) < allowed_blocks, (
            f"{last - first} blocks in {self._steps} steps"
        )
        growth = max(self._resident_bytes[settled:]) - self._resident_bytes[settled]
        assert growth < TOLERANCE_BYTES, f"{growth / 2**20:.1f} MiB in the last four fifths of {self._steps} steps"


def timer_with_few_records() -> PhaseTimer:
    """Its own ring would take 10 000 steps to fill."""
    timer = PhaseTimer()
    timer.records = deque(maxlen=100)
    return timer


def test_twenty_thousand_recorded_steps_need_no_more_memory(tmp_path):
    """Everything that lmbench does in a step, 20 000 times, with Lightning's loop played by its actions."""
    steps = 20_000
    growth = Growth(steps)
    # A window that was asked for: in one that has no end but training's, garbage is left to its collector.
    session = MeasurementSession(Schedule(WARMUP_STEPS, steps=steps))
    timer, recorder = timer_with_few_records(), RunRecorder(str(tmp_path))
    observers = [timer, MemoryRecorder(), ThroughputMeter(), QuietHost(), recorder]
    trainer = Trainer(callbacks=[*observers, session], **QUIET)
    module = Nothing()
    # Every batch is a step then, without the loop's own count of them.
    module.automatic_optimization = False
    for callback in (*observers, session):
        callback.setup(trainer, module, "fit")
    session.on_train_start(trainer, module)
    outputs, batch = {"loss": torch.ones(())}, torch.ones(())
    for step in range(steps):
        play_step(trainer)
        timer.on_train_batch_end(trainer, module, outputs, batch, step)
        session.on_train_batch_end(trainer, module, outputs, batch, step)
        growth.look()
    assert not gc.isenabled(), "garbage would be collected, which a window does not allow"
    session._close_window()
    lines = (recorder.folder.path / "steps.jsonl").read_bytes().count(b"\n")
    assert lines == steps
    growth.assert_none()


def play_step(trainer: Trainer) -> None:
    profiler: Any = trainer.profiler
    running: tuple[str, ...] = ()
    for actions in (*ACTIONS, ()):
        kept = sum(a == b for a, b in zip(running, actions, strict=False))
        for action in reversed(running[kept:]):
            profiler.stop(action)
        for action in actions[kept:]:
            profiler.start(action)
        running = actions


def test_a_real_training_with_collection_off_needs_no_more_memory(tmp_path):
    """Lightning's own loop: neither it nor lmbench leaves cycles behind."""
    steps = 1_500
    growth = Growth(steps)

    class Sizes(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if session.stage is Stage.WINDOW:
                growth.look()

    session = MeasurementSession(Schedule(WARMUP_STEPS, steps=steps))
    recorder = RunRecorder(str(tmp_path))
    callbacks = [Sizes(), timer_with_few_records(), MemoryRecorder(), ThroughputMeter(), QuietHost(), recorder, session]
    Trainer(callbacks=callbacks, **QUIET).fit(Nothing(), Endless())
    assert recorder.run.outcome == "ok"
    growth.assert_none(TORCHS_OWN_BLOCKS + 5 * NOTHING_BLOCKS)
