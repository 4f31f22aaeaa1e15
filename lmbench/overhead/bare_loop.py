"""The same training in a plain PyTorch loop: what a step costs without Lightning and without lmbench.

`ControlWindow`, which clocks it, clocks a plain Trainer too.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lmbench.errors import UsageError
from lmbench.instruments.clock import synchronize
from lmbench.instruments.compiling import CompileOptions, compile_in_place
from lmbench.instruments.host import peak_rss_bytes
from lmbench.instruments.schedule import Schedule
from lmbench.overhead.result import ArmFigures
from lmbench.precision import PRECISIONS


class ControlWindow:
    """Clocks a number of steps between two synchronizes; told of every step's end, it says when to stop.

    Garbage is collected, frozen and off inside the window, as the harness has it: one policy for all arms.

    Args:
        schedule: `warmup_steps`, `steps` and `min_window_s` count; a control has no probe steps.
        device: what is waited for at both ends, and whose peak memory is read.
        loss_divisor: what the losses that it is told were divided by.

    `figures` are known when the window is complete.
    """

    figures: ArmFigures

    def __init__(self, schedule: Schedule, device: torch.device, loss_divisor: int = 1) -> None:
        self.schedule = schedule
        self.device = device
        self.loss_divisor = loss_divisor
        self._steps_done = 0
        self._start_ns: int | None = None
        self._first_losses: list[Tensor] = []
        self._run_peak = 0

    def begin(self) -> None:
        """The first step is about to begin."""
        if self.schedule.warmup_steps == 0:
            self._open()

    def step_ended(self, losses: list[Tensor]) -> bool:
        """A step ended, with its micro-batches' losses, still on the device; True if it was the last one."""
        if not self._first_losses:
            self._first_losses = losses
        self._steps_done += 1
        if self._start_ns is None:
            if self._steps_done == self.schedule.warmup_steps:
                self._open()
            return False
        steps = self._steps_done - self.schedule.warmup_steps
        if not self.schedule.is_window_complete(steps, (time.perf_counter_ns() - self._start_ns) * 1e-9):
            return False
        self._close(steps, losses)
        return True

    def _open(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()
        if self.device.type == "cuda":
            self._run_peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        synchronize(self.device)
        self._start_ns = time.perf_counter_ns()

    def _close(self, steps: int, losses: list[Tensor]) -> None:
        synchronize(self.device)
        assert self._start_ns is not None
        wall_s = (time.perf_counter_ns() - self._start_ns) * 1e-9
        window_peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        gc.unfreeze()
        gc.enable()
        self.figures = ArmFigures(
            steps=steps,
            wall_s=wall_s,
            steady_peak_allocated_bytes=window_peak,
            run_peak_allocated_bytes=None if window_peak is None else max(window_peak, self._run_peak),
            host_peak_rss_bytes=peak_rss_bytes(),
            first_loss=self._mean(self._first_losses),
            last_loss=self._mean(losses),
        )

    def _mean(self, losses: list[Tensor]) -> float:
        return float(torch.stack(losses).double().mean()) * self.loss_divisor


@dataclass(frozen=True)
class LoopSettings:
    """What the Trainer's flags and lmbench's settings ask of the loop.

    Args:
        precision: one of Lightning's precision strings.
        mode: forward, forward_backward or train_step.
        zero_grad: `after_step`, or `native`: Lightning's place, between forward and backward.
        micro_batches: batches a step.
        clip_value: limit of the gradients' norm, or of each of their elements; 0 does not clip.
        clips_by_value: the latter.

    Raises:
        UsageError: a precision that a plain loop has no counterpart of.
    """

    precision: str
    mode: str = "train_step"
    zero_grad: str = "after_step"
    micro_batches: int = 1
    clip_value: float = 0.0
    clips_by_value: bool = False

    def __post_init__(self) -> None:
        allowed = [name for name in PRECISIONS if not name.startswith("transformer-engine")]
        if self.precision not in allowed:
            raise UsageError(f"no bare loop for precision {self.precision}; allowed: {', '.join(allowed)}")


class BareLoop:
    """Trains a LightningModule by its own `configure_model`, `configure_optimizers` and `training_step`."""

    def __init__(
        self,
        module: LightningModule,
        settings: LoopSettings,
        device: torch.device,
        compile_options: CompileOptions | None = None,
    ) -> None:
        self.settings = settings
        self.module = module
        self.device = device
        precision = PRECISIONS[settings.precision]
        self._autocast_dtype = precision.compute_dtype() if precision.is_mixed else None
        self._scaler = torch.amp.GradScaler(device.type) if precision.has_scaler else None
        with device:
            module.configure_model()
        self._dtype = precision.weight_dtype()
        module.to(device=device, dtype=self._dtype)
        optimizer = module.configure_optimizers()
        if not isinstance(optimizer, Optimizer):
            raise UsageError("the bare loop needs configure_optimizers() to return one optimizer")
        self.optimizer = optimizer
        if compile_options is not None:
            compile_in_place(module, compile_options)
        self._uses_cudagraphs = compile_options is not None and compile_options.uses_cudagraphs

    def run(self, batches: Iterable[Iterable[Tensor]], window: ControlWindow) -> None:
        """Train until the window is complete; a batch is a sequence of tensors."""
        before = torch.get_default_dtype()
        # Tensors made on the way have the weights' dtype, as under Lightning's "true" precisions.
        torch.set_default_dtype(self._dtype)
        try:
            self._run(iter(batches), window)
        finally:
            torch.set_default_dtype(before)

    def _run(self, iterator: Iterator[Iterable[Tensor]], window: ControlWindow) -> None:
        window.begin()
        is_complete = False
        while not is_complete:
            losses = [self._micro_batch(next(iterator), i) for i in range(self.settings.micro_batches)]
            if self.settings.mode == "train_step":
                self._update()
            if self.settings.mode != "forward" and self.settings.zero_grad == "after_step":
                self.optimizer.zero_grad(set_to_none=True)
            is_complete = window.step_ended(losses)

    def _micro_batch(self, batch: Iterable[Tensor], index: int) -> Tensor:
        """Forward and backward; returns the loss on the device, without its graph."""
        if self._uses_cudagraphs:
            torch.compiler.cudagraph_mark_step_begin()
        batch = [tensor.to(self.device, non_blocking=True) for tensor in batch]
        with self._precision():
            loss = cast(Tensor, self.module.training_step(batch, index))
        if self.settings.zero_grad == "native" and index == 0:
            self.optimizer.zero_grad(set_to_none=True)
        if self.settings.mode != "forward":
            scaled = loss / self.settings.micro_batches if self.settings.micro_batches > 1 else loss
            (scaled if self._scaler is None else self._scaler.scale(scaled)).backward()
        # A CUDA graph writes the next loss where this one is.
        return loss.detach().clone() if self._uses_cudagraphs else loss.detach()

    def _precision(self) -> AbstractContextManager[object]:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast_dtype)

    def _update(self) -> None:
        if self.settings.clip_value > 0:
            if self._scaler is not None:
                self._scaler.unscale_(self.optimizer)
            self._clip()
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()

    def _clip(self) -> None:
        if self.settings.clips_by_value:
            torch.nn.utils.clip_grad_value_(self.module.parameters(), self.settings.clip_value)
        else:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.clip_value)
