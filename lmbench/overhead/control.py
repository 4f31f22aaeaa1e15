"""The control arms of `lmbench overhead`: `python -m lmbench.overhead.control ARM RESULT fit [OPTIONS]`.

One process measures one arm and leaves its figures as JSON in the file RESULT. Every arm reads the very same
configuration as `lmbench fit`; where that compiles, a control compiles too, with the cache on the disk.
"""

from __future__ import annotations

import lmbench.fit.startup  # noqa: F401

# isort: split
import functools
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from jsonargparse import ArgumentError
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch import Tensor

from lmbench.callbacks import Compiler, MeasurementSession, Observer
from lmbench.callbacks.observer import STEP_HOOKS
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.fit.cli import BenchCLI
from lmbench.fit.modes import apply_mode
from lmbench.fit.trainer import TRAINER_DEFAULTS
from lmbench.instruments.compiling import CompileOptions, compile_in_place
from lmbench.instruments.oom import out_of_memory
from lmbench.instruments.phases import BorderProfiler, Scope
from lmbench.instruments.schedule import ProbeKind, Schedule
from lmbench.overhead.bare_loop import BareLoop, ControlWindow, LoopSettings
from lmbench.overhead.result import ArmFigures, HookFigures, HookTime
from lmbench.records.vocabulary import Stage


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
        device = trainer.strategy.root_device
        # Lightning hands out the loss divided for accumulation.
        self.window = ControlWindow(self._schedule, device, trainer.accumulate_grad_batches)
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
    """A configuration of `lmbench fit`, run without lmbench's callbacks. `figures` is what was measured."""

    figures: ArmFigures

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
        self.figures = self.clock.window.figures


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
        self.figures = window.figures


class HookClock:
    """Adds up host time spent inside wrapped functions; one called by another is part of it, not more.

    `spent_ns` and `calls` count outermost calls, `nested_calls` the others; `by_name` has [ns, calls] of each.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, list[int]] = {}
        self.spent_ns = self.calls = self.nested_calls = 0
        self._started_ns: int | None = None

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, clocked."""
        entry = self.by_name.setdefault(name, [0, 0])

        @functools.wraps(function)
        def clocked(*args: Any, **kwargs: Any) -> Any:
            if self._started_ns is not None:
                self.nested_calls += 1
                return function(*args, **kwargs)
            self._started_ns = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter_ns() - self._started_ns
                self._started_ns = None
                self.spent_ns += spent
                self.calls += 1
                entry[0] += spent
                entry[1] += 1

        return clocked

    def restart(self) -> None:
        """Count from here, also within a call that is going on."""
        self.spent_ns = self.calls = self.nested_calls = 0
        for entry in self.by_name.values():
            entry[:] = [0, 0]
        if self._started_ns is not None:
            self._started_ns = time.perf_counter_ns()

    def read_ns(self) -> int:
        """Nanoseconds spent so far, with those of a call that is going on."""
        running = 0 if self._started_ns is None else time.perf_counter_ns() - self._started_ns
        return self.spent_ns + running


class HookWatch(Observer):
    """Reads a HookClock at every step's end in the window; `figures` are known when it is closed."""

    figures: HookFigures

    def __init__(self, clock: HookClock) -> None:
        self.clock = clock
        self._readings: list[int] = []
        self._counts = (0, 0)

    def window_opened(self) -> None:
        self._readings = [0]
        self.clock.restart()

    def step_ended(self, stage: Stage, kind: ProbeKind | None) -> None:
        # Not in `window_closed`: before that the session waits for the device, which is no hook's cost.
        if stage is Stage.WINDOW:
            self._readings.append(self.clock.read_ns())
            self._counts = (self.clock.calls, self.clock.nested_calls)

    def window_closed(self) -> None:
        steps = len(self._readings) - 1
        spent = [end - start for start, end in zip(self._readings, self._readings[1:], strict=False)]
        calls, nested_calls = (count / steps for count in self._counts)
        call_s, nested_call_s = clocking_costs()
        self.figures = HookFigures(
            step_mean_s=statistics.fmean(spent) * 1e-9,
            step_median_s=statistics.median(spent) * 1e-9,
            calls=calls,
            nested_calls=nested_calls,
            clocking_s=calls * call_s + nested_calls * nested_call_s,
            by_name={
                name: HookTime(ns * 1e-9 / steps, count / steps)
                for name, (ns, count) in sorted(self.clock.by_name.items(), key=lambda item: -item[1][0])
            },
        )


def clocking_costs(calls: int = 20_000) -> tuple[float, float]:
    """Seconds that the clock itself adds to its figure: for each outermost call, and for each nested one."""

    def nothing() -> None:
        pass

    def many(function: Callable[[], Any]) -> int:
        start = time.perf_counter_ns()
        for _ in range(calls):
            function()
        return time.perf_counter_ns() - start

    clock = HookClock()
    empty = clock.wrap("empty", nothing)
    many(empty)
    outermost = clock.spent_ns
    nested = clock.wrap("many", many)(empty)
    plain = many(nothing)
    return tuple(max(0, spent - plain) * 1e-9 / calls for spent in (outermost, nested))  # type: ignore[return-value]


def clock_hooks(trainer: Trainer, clock: HookClock) -> HookWatch:
    """Put the clock around all that lmbench adds to a step of this trainer; once, in a process of its own.

    What Lightning itself spends on calling a callback is not in it: that shows in the harness's difference to
    a Trainer without callbacks.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, (Observer, MeasurementSession)):
            _wrap_callback(callback, clock)
    for owner, names in ((BorderProfiler, ("start", "stop", "profile")), (Scope, ("__enter__", "__exit__"))):
        for name in names:
            setattr(owner, name, clock.wrap(f"{owner.__name__}.{name}", getattr(owner, name)))
    watch = HookWatch(clock)
    # The last observer, so that a step's reading holds all the others' work; the session stays last of all.
    callbacks.insert(len(callbacks) - 1, watch)
    return watch


def _wrap_callback(callback: Callback, clock: HookClock) -> None:
    for name in STEP_HOOKS:
        if getattr(callback, name) is not None:
            wrapped = clock.wrap(f"{type(callback).__name__}.{name}", getattr(callback, name))
            setattr(callback, name, wrapped)


class HooksCLI(BenchCLI):
    """Arm `hooks`: the harness with its own hooks clocked."""

    watch: HookWatch

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        trainer = super()._instantiate_trainer(config, callbacks)
        self.watch = clock_hooks(trainer, HookClock())
        return trainer

    @property
    def figures(self) -> HookFigures:
        return self.watch.figures


ARMS: dict[str, type[ControlCLI] | type[HooksCLI]] = {
    "bare": BareCLI,
    "trainer": TrainerCLI,
    "hooks": HooksCLI,
}


def main(argv: list[str]) -> int:
    """Run one arm; returns the exit code."""
    arm, result, *args = argv
    try:
        figures = ARMS[arm](args).figures
    except (UsageError, ArgumentError) as error:
        tell(str(error))
        return ExitCode.USAGE
    except Exception as error:
        memory = out_of_memory(error)
        if memory is None:
            traceback.print_exc()
            return ExitCode.INTERNAL
        tell(f"out of memory: {memory.message}")
        return ExitCode.OUT_OF_MEMORY
    Path(result).write_bytes(msgspec.json.encode(figures))
    return ExitCode.OK


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
