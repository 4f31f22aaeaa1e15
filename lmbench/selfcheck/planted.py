"""A module with a planted truth, and a small measured run of it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lmbench.callbacks import MeasurementSession, MemoryRecorder, PhaseTimer, SyncFinder, TrainingCheck
from lmbench.instruments.window import Schedule
from lmbench.records.measured import PhaseSummary
from lmbench.records.run import RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.summary import complete_run
from lmbench.records.vocabulary import Span

Work = Callable[[], None]
SeeLoss = Callable[[Tensor, int], Tensor]


def nothing() -> None:
    """Plant nothing."""


class Block(nn.Module):
    """One block: does its planted work in the forward, another in the backward, around a tiny product."""

    def __init__(self, forward_work: Work = nothing, backward_work: Work = nothing) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.forward_work, self.backward_work = forward_work, backward_work

    def forward(self, x: Tensor) -> Tensor:
        self.forward_work()
        y = x @ self.weight
        y.register_hook(lambda _: self.backward_work())
        return y


class Planted(LightningModule):
    """A stack of blocks with planted work, and planted work at the end of the optimizer's step; `see_loss` gets each
    step's loss and index, and returns a loss."""

    def __init__(
        self, *blocks: Block, optimizer_work: Work = nothing, see_loss: SeeLoss = lambda loss, _: loss
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [Block()])
        self.optimizer_work, self.see_loss = optimizer_work, see_loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return self.see_loss(batch.square().mean(), batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        optimizer.register_step_post_hook(lambda *_: self.optimizer_work())
        return optimizer


def plant_late_rank(folder: str, late_us: float, cost_us: float) -> list[Path]:
    """Write the traces of two ranks: a product, which takes the second one longer, and a collective."""
    paths = [Path(folder, f"{rank}.json") for rank in range(2)]
    for rank, path in enumerate(paths):
        begin_us, end_us = 100 + rank * late_us, 100 + late_us + cost_us
        spans_us = {"sgemm": (0.0, begin_us), "ncclDevKernel_AllReduce_Sum_f32_RING_LL": (begin_us, end_us)}
        kernels = [
            {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin}
            for name, (begin, end) in spans_us.items()
        ]
        trace = {"distributedInfo": {"rank": rank}, "traceEvents": kernels}
        path.write_text(json.dumps(trace))
    return paths


class Measured(NamedTuple):
    """The window's steps, and the record of the run."""

    window: list[StepRecord]
    run: RunRecord

    def median_s(self, span: Span) -> float:
        return (self.run.phases.get(span) or PhaseSummary()).median_s or 0.0


def measure(
    module: LightningModule,
    device: torch.device,
    schedule: Schedule,
    clock: Literal["events", "sync"] = "events",
) -> Measured:
    """Train `module` on one small resident batch under the harness's own callbacks."""
    # A Trainer is a cycle: what the check before had on the device would be freed in the midst of this one's peaks.
    gc.collect()
    timer, session = PhaseTimer(clock), MeasurementSession(schedule)
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[timer, MemoryRecorder(), TrainingCheck(), SyncFinder(), session],
    )
    # The same small batch for ever, already on the device.
    trainer.fit(module, repeat(torch.rand(8, 8, device=device)))
    complete_run(session.run, timer.records, session.raw_wall_s)
    return Measured([step for step in timer.records if step.stage == "window"], session.run)
