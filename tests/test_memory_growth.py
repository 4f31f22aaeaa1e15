"""Host memory does not grow with the number of recorded steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
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
from lmbench.measure.schedule import Schedule
from lmbench.records.vocabulary import Stage

from conftest import QUIET

# What a process's resident size does by itself: the allocator's arenas, pages of libraries touched late.
TOLERANCE_BYTES = 2 * 2**20
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


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def assert_flat(sizes: list[int], steps: int) -> None:
    """From a fifth of the run on, after every buffer and ring is full, the size stays."""
    settled = sizes[len(sizes) // 5 :]
    growth = max(settled) - settled[0]
    assert growth < TOLERANCE_BYTES, f"{growth / 2**20:.1f} MiB in the last four fifths of {steps} steps"


@pytest.mark.slow
def test_a_hundred_thousand_recorded_steps_need_no_more_memory(tmp_path):
    """Everything that lmbench does in a step, 100 000 times, with Lightning's loop played by its actions."""
    steps, sizes = 100_000, []
    # A window that was asked for: in one that has no end but training's, garbage is left to its collector.
    session = MeasurementSession(Schedule(WARMUP_STEPS, steps=steps))
    timer, recorder = PhaseTimer(), RunRecorder(str(tmp_path))
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
        if step % (steps // 50) == 0:
            sizes.append(resident_bytes())
    assert not gc.isenabled(), "garbage would be collected, which a window does not allow"
    session._close_window()
    lines = (recorder.folder.path / "steps.jsonl").read_bytes().count(b"\n")
    assert lines == steps
    assert_flat(sizes, steps)


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


@pytest.mark.slow
def test_a_real_training_with_collection_off_needs_no_more_memory(tmp_path):
    """Lightning's own loop, for as many steps as 30 s allow: neither it nor lmbench leaves cycles behind."""
    sizes: list[int] = []

    class Sizes(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if session.stage is Stage.WINDOW and trainer.global_step % 200 == 0:
                sizes.append(resident_bytes())

    session = MeasurementSession(Schedule(WARMUP_STEPS, steps=5_000, min_window_s=30.0))
    recorder = RunRecorder(str(tmp_path))
    callbacks = [Sizes(), PhaseTimer(), MemoryRecorder(), ThroughputMeter(), QuietHost(), recorder, session]
    Trainer(callbacks=callbacks, **QUIET).fit(Nothing(), Endless())
    assert recorder.run.outcome == "ok"
    assert_flat(sizes, recorder.run.window.steps)
