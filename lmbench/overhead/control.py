"""The control arms of `lmbench overhead`: `python -m lmbench.overhead.control ARM RESULT fit [OPTIONS]`.

One process measures one arm, perhaps in turns with another one, and writes what it measured as JSON to the file RESULT.
All arms read the same configuration as `lmbench fit`. If the configuration compiles the model, a control arm compiles
it too, with torch's cache on the disk.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import msgspec
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lmbench.device import device_of, synchronize
from lmbench.errors import ExitCode, UsageError, find_modules_in_current_folder
from lmbench.fit.command_line import CommandLine
from lmbench.fit.measurement import Measurement, apply_mode
from lmbench.fit.model_parallel import ModelParallel
from lmbench.fit.ranks import count_to_start, rank_of_process, run_ranks
from lmbench.fit.run import report_failure
from lmbench.fit.trainer import TRAINER_DEFAULTS, BenchTrainer
from lmbench.flop_counter import silence_logging
from lmbench.instruments.compiling import CompileOptions, compile_in_place
from lmbench.instruments.input_pipeline import endless
from lmbench.instruments.turns import TurnTaking
from lmbench.instruments.window import Schedule, quiet_collector
from lmbench.overhead import ArmWindow
from lmbench.precision import PRECISIONS, Precision


class ControlWindow(Callback):
    """Times the window's steps between two synchronizes, and says when to stop; as a callback or called by a loop.

    All arms share the schedule and the collection of garbage of a measuring session, but a control arm runs no probe
    steps. As a callback it does the least that timing a Trainer takes, and compiles the module if the configuration
    says so.

    `measured` is there once the window is complete.
    """

    measured: ArmWindow

    def __init__(self, schedule: Schedule, trainer: Trainer, options: CompileOptions | None) -> None:
        self.options = options
        self.uses_cudagraphs = options is not None and options.uses_cudagraphs
        self._schedule, self._device = schedule, trainer.strategy.root_device
        self._micro_batches = trainer.accumulate_grad_batches
        self._collector, self._steps = ExitStack(), -schedule.warmup_steps
        self._losses, self._first_losses = list[Tensor](), list[Tensor]()
        self._turns = TurnTaking.of_environment()

    def _open_after_warmup(self) -> None:
        if self._steps == 0:
            quiet_collector(self._collector)
            synchronize(self._device)
            if self._turns:
                self._turns.begin(self._device, self._schedule)
            self._start_s = time.perf_counter()

    def micro_batch_ended(self, loss: Tensor) -> bool:
        """Count a micro-batch; returns True once the window is complete.

        Args:
            loss: its loss on the device, divided by the number of micro-batches.
        """
        self._losses.append(loss)
        if len(self._losses) < self._micro_batches:
            return False
        losses, self._losses = self._losses, []
        self._first_losses = self._first_losses or losses
        self._steps += 1
        if self._steps <= 0:
            self._open_after_warmup()
            return False
        is_complete = self._schedule.is_window_complete(self._steps, time.perf_counter() - self._start_s)
        if is_complete:
            self._close(losses)
        elif self._turns:
            self._turns.step_ended()
            if self._turns.is_part_over:
                self._start_s += self._turns.pass_on()
        return is_complete

    def _close(self, losses: list[Tensor]) -> None:
        synchronize(self._device)
        step_s = (time.perf_counter() - self._start_s) / self._steps
        self._collector.close()
        first, last = (float(torch.stack(step).double().sum()) for step in (self._first_losses, losses))
        self.measured = ArmWindow(self._steps, step_s, first, last)
        if self._turns:
            self._turns.end()
            self.measured.turns_s = [*zip(self._turns.own_steps_s, self._turns.other_steps_s, strict=False)]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.options is not None:
            # Until the process ends.
            self.options.splitting().__enter__()
            compile_in_place(pl_module, self.options, ExitStack())
        self._open_after_warmup()

    def on_train_batch_start(self, *_: Any) -> None:
        if self.uses_cudagraphs:
            torch.compiler.cudagraph_mark_step_begin()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        trainer.should_stop = self.micro_batch_ended(outputs["loss"])


class DoBenchWindow(ControlWindow):
    """Times each step as `triton.testing.do_bench` times a function (triton-lang/triton:python/triton/testing.py).

    Events stand around each step, and `step_s` is the mean of their spans. Before each step 256 MiB are
    written, which empties the L2 cache; the host goes on meanwhile, as it does in the time between steps.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = device_of(self._device).clock("events")
        self._cache = torch.empty(2**26, dtype=torch.int32, device=self._device)
        self._spans = list[tuple[Any, Any]]()
        super().on_train_start(trainer, pl_module)

    def on_train_batch_start(self, *_: Any) -> None:
        super().on_train_batch_start()
        if not self._losses:
            self._cache.zero_()
            self._start = self._clock.stamp()

    def micro_batch_ended(self, loss: Tensor) -> bool:
        if len(self._losses) + 1 == self._micro_batches:
            self._spans.append((self._start, self._clock.stamp()))
        is_complete = super().micro_batch_ended(loss)
        if is_complete:
            self.measured.step_s = fmean(self._clock.seconds(*span) for span in self._spans[-self._steps :])
        return is_complete


class _Step(nn.Module):
    """Calls a module's training step in its forward, since DistributedDataParallel wraps a forward.

    `require_backward_grad_sync` is DistributedDataParallel's switch, which the loop sets on this class too.
    """

    require_backward_grad_sync: bool

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any, index: int) -> Any:
        return self.module.training_step(batch, index)


def _built(
    module: LightningModule, trainer: Trainer, precision: Precision
) -> tuple[Any, Optimizer, list[LRSchedulerConfig]]:
    """The training step of a module on its device, parallelized as the strategy does it, and the module's optimizer and
    learning rate schedules."""
    strategy, device = trainer.strategy, trainer.strategy.root_device
    with device:
        module.configure_model()
    # fp8 replaces layers, so the optimizer has to be made afterwards.
    trainer.precision_plugin.convert_module(module)
    module.to(device=device, dtype=precision.weight_dtype())
    silence_logging(module)
    step: Any = _Step(module)
    if isinstance(strategy, ModelParallel):
        strategy.parallelize(module, str(trainer.precision))
    elif isinstance(strategy, DDPStrategy):
        step = DistributedDataParallel(step, strategy.determine_ddp_device_ids(), **strategy._ddp_kwargs)
    optimizers, schedules = _init_optimizers_and_lr_schedulers(module)
    if len(optimizers) != 1:
        raise UsageError("the bare loop needs configure_optimizers() to return one optimizer")
    return step, optimizers[0], schedules


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Sequence):
        return [tensor.to(device, non_blocking=True) for tensor in batch]
    # Lightning's function takes 6 us more.
    return move_data_to_device(batch, device)


def _update(
    module: LightningModule,
    trainer: Trainer,
    scaler: torch.amp.GradScaler,
    optimizer: Optimizer,
    schedules: Sequence[LRSchedulerConfig],
    batches: int,
) -> None:
    """Update the weights, after clipping the gradients by value or by norm as the trainer's flags say.

    Then take a step of each schedule that is due after so many batches; those that go by epochs stand still.
    """
    if limit := trainer.gradient_clip_val:
        scaler.unscale_(optimizer)
        by_value = trainer.gradient_clip_algorithm == "value"
        clip = nn.utils.clip_grad_value_ if by_value else nn.utils.clip_grad_norm_
        clip(module.parameters(), float(limit))
    scaler.step(optimizer)
    scaler.update()
    for schedule in schedules:
        if schedule.interval == "step" and batches % schedule.frequency == 0:
            module.lr_scheduler_step(schedule.scheduler, None)


def train_bare(
    module: LightningModule,
    trainer: Trainer,
    batches: Iterable[Any],
    window: ControlWindow,
    mode: str,
    zero_grad: str,
) -> None:
    """Train a LightningModule in a plain PyTorch loop until the window is complete.

    Of the module the loop calls `configure_model`, `configure_optimizers` and `training_step`; `self.log` does nothing.

    Args:
        module: the module.
        trainer: gives precision, clipping, micro-batches, device and strategy; it trains nothing.
        batches: batches, each a sequence of tensors, a mapping or a tensor.
        window: times the steps and ends the loop.
        mode: forward, forward_backward or train_step.
        zero_grad: `after_step`, or `native`, which is Lightning's order (between forward and backward).

    Raises:
        UsageError: the module has several optimizers, or the precision is Transformer Engine's, which replaces layers.
    """
    name, device = str(trainer.precision), trainer.strategy.root_device
    if name.startswith("transformer-engine"):
        raise UsageError(f"no bare loop for precision {name}; choose another --trainer.precision")
    precision = PRECISIONS[name]
    autocast = torch.autocast(device.type, precision.compute_dtype()) if precision.is_mixed else nullcontext()
    scaler = torch.amp.GradScaler(device.type, enabled=precision.has_scaler)
    micro_batches = trainer.accumulate_grad_batches
    step, optimizer, schedules = _built(module, trainer, precision)
    default_dtype = torch.get_default_dtype()
    # Lightning's "true" precisions, too, give new tensors the dtype of the weights.
    torch.set_default_dtype(precision.weight_dtype())
    try:
        window.on_train_start(trainer, module)
        for index, batch in enumerate(batches):
            window.on_train_batch_start()
            moved = _moved(batch, device)
            is_last = (index + 1) % micro_batches == 0
            step.require_backward_grad_sync = is_last
            trainer.strategy.on_train_batch_start(moved, index)
            with autocast:
                loss = cast(Tensor, step(moved, index % micro_batches))
            if micro_batches > 1:
                loss = loss / micro_batches
            if zero_grad == "native" and index % micro_batches == 0:
                optimizer.zero_grad(set_to_none=True)
            if mode != "forward":
                scaler.scale(loss).backward()
            if is_last:
                if mode == "train_step":
                    _update(module, trainer, scaler, optimizer, schedules, index + 1)
                if mode != "forward" and zero_grad == "after_step":
                    optimizer.zero_grad(set_to_none=True)
            # A CUDA graph overwrites this loss with the next one.
            if window.micro_batch_ended(loss.detach().clone() if window.uses_cudagraphs else loss.detach()):
                break
    finally:
        torch.set_default_dtype(default_dtype)


def measure_control(arm: str, words: list[str]) -> tuple[ArmWindow, LightningModule]:
    """Measure a configuration without lmbench's callbacks; returns what was measured, and the trained module.

    Args:
        arm: `trainer` runs Lightning's Trainer with everything off and Lightning's order of zeroing gradients. `bare`
            builds the Trainer too, to read the flags and find the device, but trains in a plain loop, as `do_bench`
            does, which times it in another way.
        words: the configuration as words of `lmbench fit`.

    Raises:
        UsageError: the words are wrong.
    """
    line = CommandLine("fit", words)
    settings = line.build("measure")
    plan = Measurement("fit", line.model, settings)
    seed_everything(line.config.seed_everything, workers=True, verbose=False)
    torch.set_float32_matmul_precision(settings.matmul_precision)
    module, data, flags = line.build("model"), line.build("data"), vars(line.build("trainer"))
    # Turn off what the configuration adds to the work; keep the flags that change the work itself.
    off = {**TRAINER_DEFAULTS, "callbacks": None, "profiler": None}
    off |= {name: flags[name] for name in ("max_epochs", "devices")}
    trainer = BenchTrainer(**{**flags, **off})
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    # The window replaces the Compiler callback, which would start a measuring session.
    kind = DoBenchWindow if arm == "do_bench" else ControlWindow
    window = callbacks[0] = kind(settings, trainer, callbacks[0].options)
    if arm == "trainer":
        apply_mode(module, plan.mode, "native")
        trainer.fit(module, datamodule=data)
        return window.measured, module
    trainer.strategy.connect(module)
    trainer.strategy.setup_environment()
    for part in filter(None, (data, module)):
        # The module asks its trainer for the precision, and the data asks for the device.
        part.trainer = trainer
        part.prepare_data()
        part.setup("fit")
    loader = (data or module).train_dataloader()
    train_bare(module, trainer, endless(loader), window, plan.mode, plan.zero_grad)
    return window.measured, module


def leave_result(arm: str, result: str, words: list[str]) -> int:
    """Measure an arm as this process's rank, and write what rank 0 measured to `result`; returns the exit code."""
    try:
        measured = measure_control(arm, words)[0]
    except Exception as error:
        return report_failure(error)
    if rank_of_process() == 0:
        Path(result).write_bytes(msgspec.json.encode(measured))
    return ExitCode.OK


if __name__ == "__main__":
    arm, result, _, *words = sys.argv[1:]
    find_modules_in_current_folder()
    count = count_to_start(vars(CommandLine("fit", words).build("trainer", callbacks=None, logger=None, profiler=None)))
    measure = partial(leave_result, arm, result, words)
    if count == 1:
        sys.exit(measure())
    ends = run_ranks(Path(result).parent, count, measure, measure, Schedule.collective_timeout_s)[0]
    failed_rank = next((end for end in ends if end.code), None)
    if failed_rank is not None:
        print(failed_rank.log, file=sys.stderr)
        sys.exit(max(failed_rank.code, 1))
