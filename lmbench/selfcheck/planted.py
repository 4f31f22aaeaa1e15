"""Modules with a planted truth, and a small measured run of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lmbench.callbacks import MeasurementSession, MemoryRecorder, PhaseTimer, SyncFinder, TrainingCheck
from lmbench.instruments.schedule import Schedule
from lmbench.records.run import RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import Span

Work = Callable[[], None]


def nothing() -> None:
    """Plant nothing."""


class _BackwardWork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Work) -> Tensor:
        ctx.work = work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.work()
        return grad, None


class _WorkingSGD(torch.optim.SGD):
    """SGD whose update also does the planted work."""

    work: Work = staticmethod(nothing)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.work()
        return loss


class Block(nn.Module):
    """One block: does its planted work in the forward, another in the backward, around a tiny product."""

    def __init__(self, forward_work: Work, backward_work: Work) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.forward_work, self.backward_work = forward_work, backward_work

    def forward(self, x: Tensor) -> Tensor:
        self.forward_work()
        y: Tensor = _BackwardWork.apply(x @ self.weight, self.backward_work)  # type: ignore[no-untyped-call]
        return y


class Planted(LightningModule):
    """A stack of blocks with planted work, and planted work in the optimizer's step."""

    def __init__(self, blocks: list[Block], optimizer_work: Work = nothing) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.optimizer_work = optimizer_work

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = _WorkingSGD(self.parameters(), lr=0.01)
        optimizer.work = self.optimizer_work
        return optimizer


class ResidentBatches:
    """The same small batch for ever, already on the device."""

    def __init__(self, device: torch.device) -> None:
        self.batch = torch.rand(8, 8, device=device)

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield self.batch


@dataclass
class Measured:
    """The window's steps, the record of the run, and the window's wall time with its pauses in it."""

    window: list[StepRecord]
    run: RunRecord
    raw_wall_s: float

    def median_s(self, span: Span) -> float:
        values = sorted(step.span_s(span) or 0.0 for step in self.window)
        return values[len(values) // 2]

    @property
    def identity_error_fraction(self) -> float:
        pauses_s = sum(step.excluded_s or 0.0 for step in self.window)
        return sum(step.step_s or 0.0 for step in self.window) / (self.raw_wall_s - pauses_s) - 1.0


def measure(
    module: LightningModule,
    device: torch.device,
    schedule: Schedule,
    clock: Literal["events", "sync"] = "events",
) -> Measured:
    """Train `module` on one small resident batch under the harness's own callbacks."""
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
    trainer.fit(module, ResidentBatches(device))
    window = [step for step in timer.records if step.stage == "window"]
    return Measured(window, session.run, session.raw_wall_s or 0.0)


def spin(duration_s: float) -> Work:
    """Host work of a known length."""

    def work() -> None:
        end = time.perf_counter() + duration_s
        while time.perf_counter() < end:
            pass

    return work
