"""The control arms of `lmbench overhead`: `python -m lmbench.overhead.control ARM RESULT fit [OPTIONS]`.

One process measures one arm and leaves a run's record as JSON in the file RESULT. Both arms read the very same
configuration as `lmbench fit`; where that compiles, a control compiles too, with the cache on the disk.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.optim import Optimizer

from lmbench.callbacks import Compiler
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.fit.command_line import CommandLine
from lmbench.fit.measurement import Measurement
from lmbench.fit.modes import apply_mode
from lmbench.fit.trainer import TRAINER_DEFAULTS, BenchTrainer
from lmbench.instruments.clock import synchronize
from lmbench.instruments.compiling import CompileOptions, compile_in_place
from lmbench.instruments.oom import out_of_memory
from lmbench.instruments.schedule import Schedule
from lmbench.instruments.window import AllocatorPeaks, QuietCollector
from lmbench.precision import PRECISIONS
from lmbench.records.measured import Loss, Window
from lmbench.records.run import SCHEMA_VERSION, RunRecord


class ControlWindow(Callback):
    """Clocks a number of steps between two synchronizes; told of every step's end, it says when to stop.

    Schedule, collection of garbage and peaks are the session's: one policy for all arms. A control has no probe steps.
    As a callback it is the least that a Trainer needs to be clocked.

    `record` has window, memory and losses when the window is complete.
    """

    compile_options: CompileOptions | None = None

    def __init__(self, schedule: Schedule) -> None:
        self.record = RunRecord(SCHEMA_VERSION, "ok")
        self._schedule = schedule
        self._steps_done = 0
        self._first_losses: list[Tensor] = []

    def begin(self, device: torch.device, loss_divisor: int = 1) -> None:
        """The first step is about to begin; losses come divided by `loss_divisor`."""
        self._device, self._loss_divisor = device, loss_divisor
        self._collector, self._peaks = QuietCollector(), AllocatorPeaks(device)
        self._open_after_warmup()

    def step_ended(self, losses: list[Tensor]) -> bool:
        """A step ended, with its micro-batches' losses, still on the device; True if it was the last one."""
        self._first_losses = self._first_losses or losses
        self._steps_done += 1
        steps = self._steps_done - self._schedule.warmup_steps
        if steps <= 0:
            self._open_after_warmup()
            return False
        is_complete = self._schedule.is_window_complete(steps, (time.perf_counter_ns() - self._start_ns) * 1e-9)
        if is_complete:
            synchronize(self._device)
            wall_s = (time.perf_counter_ns() - self._start_ns) * 1e-9
            self.record.window = Window(steps=steps, wall_s=wall_s)
            self._peaks.end_window(self.record.memory)
            self._collector.end()
            first, last = (
                float(torch.stack(of_step).double().mean()) * self._loss_divisor
                for of_step in (self._first_losses, losses)
            )
            self.record.loss = Loss(first=first, last=last)
        return is_complete

    def _open_after_warmup(self) -> None:
        if self._steps_done == self._schedule.warmup_steps:
            self._collector.begin()
            self._peaks.begin_window()
            synchronize(self._device)
            self._start_ns = time.perf_counter_ns()

    # Lightning's hooks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.compile_options is not None:
            compile_in_place(pl_module, self.compile_options)
        self._steps_seen = trainer.global_step
        self._losses: list[Tensor] = []
        # Lightning hands out the loss divided for accumulation.
        self.begin(trainer.strategy.root_device, trainer.accumulate_grad_batches)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.compile_options is not None and self.compile_options.uses_cudagraphs:
            torch.compiler.cudagraph_mark_step_begin()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._losses.append(outputs["loss"])
        if trainer.global_step == self._steps_seen:
            return
        self._steps_seen = trainer.global_step
        losses, self._losses = self._losses, []
        trainer.should_stop = self.step_ended(losses)


class BareLoop:
    """Trains a LightningModule by its own `configure_model`, `configure_optimizers` and `training_step`.

    Args:
        trainer: its flags say precision, clipping, micro-batches and device; it trains nothing.
        mode: forward, forward_backward or train_step.
        zero_grad: `after_step`, or `native`: Lightning's place, between forward and backward.

    Raises:
        UsageError: a precision that a plain loop has no counterpart of, or several optimizers.
    """

    def __init__(
        self,
        module: LightningModule,
        trainer: Trainer,
        mode: str = "train_step",
        zero_grad: str = "after_step",
        compile_options: CompileOptions | None = None,
    ) -> None:
        self.module, self.mode, self.zero_grad = module, mode, zero_grad
        self.device = trainer.strategy.root_device
        self.micro_batches = trainer.accumulate_grad_batches
        self._clip_value = float(trainer.gradient_clip_val or 0.0)
        by_value = trainer.gradient_clip_algorithm == "value"
        self._clip = torch.nn.utils.clip_grad_value_ if by_value else torch.nn.utils.clip_grad_norm_
        precision = plain_precision(str(trainer.precision))
        mixed_dtype = precision.compute_dtype() if precision.is_mixed else None
        self._autocast = nullcontext if mixed_dtype is None else lambda: torch.autocast(self.device.type, mixed_dtype)
        self._scaler = torch.amp.GradScaler(self.device.type) if precision.has_scaler else None
        with self.device:
            module.configure_model()
        self._dtype = precision.weight_dtype()
        module.to(device=self.device, dtype=self._dtype)
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
            iterator = iter(batches)
            window.begin(self.device)
            is_complete = False
            while not is_complete:
                losses = [self._micro_batch(next(iterator), i) for i in range(self.micro_batches)]
                if self.mode == "train_step":
                    self._update()
                if self.mode != "forward" and self.zero_grad == "after_step":
                    self.optimizer.zero_grad(set_to_none=True)
                is_complete = window.step_ended(losses)
        finally:
            torch.set_default_dtype(before)

    def _micro_batch(self, batch: Iterable[Tensor], index: int) -> Tensor:
        """Forward and backward; returns the loss on the device, without its graph."""
        if self._uses_cudagraphs:
            torch.compiler.cudagraph_mark_step_begin()
        batch = [tensor.to(self.device, non_blocking=True) for tensor in batch]
        with self._autocast():
            loss = cast(Tensor, self.module.training_step(batch, index))
        if self.zero_grad == "native" and index == 0:
            self.optimizer.zero_grad(set_to_none=True)
        if self.mode != "forward":
            scaled = loss / self.micro_batches if self.micro_batches > 1 else loss
            (scaled if self._scaler is None else self._scaler.scale(scaled)).backward()
        # A CUDA graph writes the next loss where this one is.
        return loss.detach().clone() if self._uses_cudagraphs else loss.detach()

    def _update(self) -> None:
        if self._clip_value > 0:
            if self._scaler is not None:
                self._scaler.unscale_(self.optimizer)
            self._clip(self.module.parameters(), self._clip_value)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()


def plain_precision(name: str) -> Any:
    """The precision of a plain loop.

    Raises:
        UsageError: Transformer Engine's replace layers, which a plain loop does not.
    """
    if name.startswith("transformer-engine"):
        allowed = ", ".join(known for known in PRECISIONS if not known.startswith("transformer-engine"))
        raise UsageError(f"no bare loop for precision {name}; allowed: {allowed}")
    return PRECISIONS[name]


def measure_control(arm: str, words: list[str]) -> tuple[RunRecord, LightningModule]:
    """Measure a configuration of `lmbench fit` without lmbench's callbacks; returns the record and the trained module.

    Args:
        arm: `trainer` is Lightning's Trainer with everything off, zeroing gradients where Lightning does. For `bare`
            the Trainer is built, which reads the flags and finds the device, and trains nothing.
        words: the configuration, as `lmbench fit` takes it.
    """
    line = CommandLine("fit", words)
    settings = line.build("measure")
    plan = Measurement("fit", line.model, settings, {})
    seed_everything(line.config.seed_everything, workers=True, verbose=False)
    torch.set_float32_matmul_precision(settings.matmul_precision)
    module, data, flags = line.build("model"), line.build("data"), vars(line.build("trainer"))
    clock = ControlWindow(Schedule(settings.warmup_steps, settings.steps, settings.min_window_s))
    # Whatever else the configuration turns on is off here; what changes the work itself stays.
    off = {**TRAINER_DEFAULTS, "callbacks": [clock], "profiler": None, "max_epochs": flags["max_epochs"]}
    trainer = BenchTrainer(**{**flags, **off})
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    compiler = next(callback for callback in callbacks if isinstance(callback, Compiler))
    # It brings a measuring session with it, so that its work is done here.
    callbacks.remove(compiler)
    clock.compile_options = compiler.options
    if arm == "trainer":
        apply_mode(module, plan.mode, "native")
        trainer.fit(module, datamodule=data)
        return clock.record, module
    trainer.strategy.setup_environment()
    # The module asks its trainer for the precision, the data for the device.
    module.trainer = data.trainer = trainer
    data.prepare_data()
    data.setup("fit")
    BareLoop(module, trainer, plan.mode, plan.zero_grad, compiler.options).run(data.train_dataloader(), clock)
    return clock.record, module


def main(argv: list[str]) -> int:
    """Run one arm; returns the exit code."""
    arm, result, _, *words = argv
    try:
        record, _ = measure_control(arm, words)
    except UsageError as error:
        tell(str(error))
        return ExitCode.USAGE
    except Exception as error:
        traceback.print_exc()
        return ExitCode.INTERNAL if out_of_memory(error) is None else ExitCode.OUT_OF_MEMORY
    Path(result).write_bytes(msgspec.json.encode(record))
    return ExitCode.OK


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
