"""The control arms of `lmbench overhead`: `python -m lmbench.overhead.control ARM RESULT fit [OPTIONS]`.

One process measures one arm and leaves its record as JSON in the file RESULT. Every arm reads the very same
configuration as `lmbench fit`; where that compiles, a control compiles too, with the cache on the disk.
"""

from __future__ import annotations

import lmbench.fit.startup  # noqa: F401

# isort: split
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentError
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch import Tensor

from lmbench.callbacks import Compiler
from lmbench.errors import ExitCode, UsageError
from lmbench.fit.cli import BenchCLI
from lmbench.fit.modes import apply_mode
from lmbench.fit.trainer import TRAINER_DEFAULTS
from lmbench.measure.compiling import CompileOptions, compile_in_place
from lmbench.measure.oom import out_of_memory
from lmbench.measure.schedule import Schedule
from lmbench.overhead.bare_loop import BareLoop, LoopSettings
from lmbench.overhead.control_window import ControlWindow
from lmbench.overhead.hook_clock import HookClock, HookWatch, clock_hooks


class WallClock(Callback):
    """The least a Trainer needs to be clocked: counts steps and stops the run when its window is complete."""

    window: ControlWindow

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._losses: list[Tensor] = []
        self.compile_options: CompileOptions | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.compile_options is not None:
            compile_in_place(pl_module, self.compile_options)
        self._steps_seen = trainer.global_step
        self.window = ControlWindow(self._schedule, trainer.strategy.root_device)
        self.window.begin()

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
        if self.window.step_ended(losses):
            trainer.should_stop = True


class ControlCLI(BenchCLI):
    """A configuration of `lmbench fit`, run without lmbench's callbacks. `record` is what was measured."""

    record: dict[str, Any]

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        settings = self.settings
        self.schedule = Schedule(settings.warmup_steps, settings.steps, settings.min_window_s)
        self.clock = WallClock(self.schedule)
        # Whatever else the configuration turns on is off here; what changes the work itself stays.
        off = {**TRAINER_DEFAULTS, "callbacks": None, "profiler": None, "max_epochs": config["max_epochs"]}
        trainer = LightningCLI._instantiate_trainer(self, {**config, **off}, [self.clock])
        assert isinstance(trainer, Trainer)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        compiler = next(callback for callback in callbacks if isinstance(callback, Compiler))
        # It brings a measuring session with it, so that its work is done here.
        callbacks.remove(compiler)
        self.clock.compile_options = compiler.options
        return trainer


class TrainerCLI(ControlCLI):
    """Arm `trainer`: Lightning's Trainer with everything off, zeroing gradients where Lightning does."""

    def after_instantiate_classes(self) -> None:
        apply_mode(self.model, self.mode, "native")

    def fit(self, **kwargs: Any) -> None:
        self.trainer.fit(**kwargs)
        self.record = dict(self.clock.window.record)
        for name in ("first_loss", "last_loss"):
            # Lightning hands out the loss divided for accumulation.
            self.record[name] *= self.trainer.accumulate_grad_batches


class BareCLI(ControlCLI):
    """Arm `bare`: the Trainer is built, which reads the flags and finds the device, and trains nothing."""

    def after_instantiate_classes(self) -> None:
        """The module stays as it is."""

    def fit(self, **kwargs: Any) -> None:
        trainer, module, data = self.trainer, self.model, self.datamodule
        device = trainer.strategy.root_device
        trainer.strategy.setup_environment()
        settings = LoopSettings(
            precision=str(trainer.precision),
            mode=self.mode,
            zero_grad=self.settings.zero_grad,
            micro_batches=trainer.accumulate_grad_batches,
            clip_value=float(trainer.gradient_clip_val or 0.0),
            clips_by_value=trainer.gradient_clip_algorithm == "value",
        )
        # The module asks its trainer for the precision, the data for the device.
        module.trainer = data.trainer = trainer
        data.prepare_data()
        data.setup("fit")
        loop = BareLoop(module, settings, device, self.clock.compile_options)
        window = ControlWindow(self.schedule, device)
        loop.run(data.train_dataloader(), window)
        self.record = window.record


class HooksCLI(BenchCLI):
    """Arm `hooks`: the harness with its own hooks clocked."""

    watch: HookWatch

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        trainer = super()._instantiate_trainer(config, callbacks)
        self.watch = clock_hooks(trainer, HookClock())
        return trainer

    @property
    def record(self) -> dict[str, Any]:
        return self.watch.record


ARMS: dict[str, type[ControlCLI] | type[HooksCLI]] = {
    "bare": BareCLI,
    "trainer": TrainerCLI,
    "hooks": HooksCLI,
}


def main(argv: list[str]) -> int:
    """Run one arm; returns the exit code."""
    arm, result, *args = argv
    try:
        record = ARMS[arm](args).record
    except (UsageError, ArgumentError) as error:
        print(f"lmbench: {error}", file=sys.stderr)
        return ExitCode.USAGE
    except Exception as error:
        memory = out_of_memory(error)
        if memory is None:
            traceback.print_exc()
            return ExitCode.INTERNAL
        print(f"lmbench: out of memory: {memory.message}", file=sys.stderr)
        return ExitCode.OUT_OF_MEMORY
    Path(result).write_text(json.dumps(record), encoding="utf-8")
    return ExitCode.OK


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
