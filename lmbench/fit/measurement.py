"""Run one measurement, from settings to the closed and completed record.

Command lines, cells of sweeps and `lmbench.measure` all come through here. A mode removes parts of the training step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.profilers import PassThroughProfiler
from torch.optim import Optimizer

from lmbench.callbacks import (
    GradientNorm,
    LoaderProbe,
    MeasurementSession,
    MemoryHistory,
    MemoryRecorder,
    Observer,
    PhaseTimer,
    ProgressLine,
    RunRecorder,
    SyncFinder,
    ThroughputMeter,
    TrainingCheck,
    Turns,
)
from lmbench.callbacks.one_process import OneProcess
from lmbench.device import synchronize
from lmbench.errors import UsageError, error_line, tell
from lmbench.fit.choice import OWN_DATA
from lmbench.fit.settings import MeasureSettings
from lmbench.fit.trainer import BenchTrainer, as_list
from lmbench.instruments.ending import is_checkpoint_mismatch
from lmbench.instruments.module_parts import AlikeBlocks
from lmbench.instruments.turns import TurnTaking
from lmbench.interruption import exits_raised, held, is_listening, received
from lmbench.memory.forecast import Request, ask_forecast, gpu_of
from lmbench.model.attention_layer import AttentionLayer
from lmbench.records.examined import MemoryPrediction
from lmbench.records.field import PerPhase
from lmbench.records.measured import Guard
from lmbench.records.passes import recording_of
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
from lmbench.records.vocabulary import Mode, Values
from lmbench.report.answer import Answer
from lmbench.report.banner import banner
from lmbench.report.render import Output, give
from lmbench.rooms import INSTALLED, ROOMS


def usual_mode(model: type) -> Mode:
    """The default mode of a model class."""
    return "forward_backward" if issubclass(model, AttentionLayer) else "train_step"


def apply_mode(module: LightningModule, mode: str, zero_grad: str) -> None:
    """Change, on this module instance only, what Lightning's loop does after the forward.

    `forward`: the backward does nothing, so the graph is built and dropped. `forward_backward`: the optimizer step runs
    its closure only, so gradients are computed and weights stay. `zero_grad="after_step"`: gradients are freed at the
    end of the step instead of between the next forward and backward. Other settings leave the module alone.

    Raises:
        UsageError: the module optimizes manually, which cannot be changed from outside, or has nothing to optimize.
    """
    if mode == "train_step" and isinstance(module, AttentionLayer):
        raise UsageError(
            "measure.mode is train_step, and attention by itself has nothing to optimize; allowed: forward, "
            "forward_backward"
        )
    if mode != "inference" and not module.automatic_optimization:
        reason = f"but {type(module).__name__} optimizes by hand (automatic_optimization is False)"
        if mode != "train_step":
            raise UsageError(f"measure.mode is {mode}, {reason}; allowed: train_step")
        if zero_grad == "after_step":
            raise UsageError(f"measure.zero_grad is after_step, {reason}; allowed: native")
    if mode == "forward":
        module.backward = _do_nothing  # type: ignore[method-assign]
    if mode in ("forward", "forward_backward"):
        module.optimizer_step = _run_closure_only  # type: ignore[method-assign,assignment]
    if zero_grad == "after_step" and mode in ("forward_backward", "train_step"):
        _zero_after_step(module)


def _do_nothing(*_: Any, **__: Any) -> None:
    """Replace a method that a mode leaves out."""


def _run_closure_only(
    epoch: int, batch_idx: int, optimizer: Optimizer, closure: Callable[[], Any] | None = None
) -> None:
    """Run forward and backward, which are in the closure, without the update."""
    if closure is not None:
        closure()


def _zero_after_step(module: LightningModule) -> None:
    step, zero = module.optimizer_step, module.optimizer_zero_grad

    def optimizer_step(*arguments: Any) -> None:
        """Take the epoch, the batch's index, the optimizer and the closure."""
        step(*arguments)
        # Lightning's own name for this action, so that every profiler recognizes it.
        with module.trainer.profiler.profile(  # type: ignore[attr-defined]
            f"[LightningModule]{type(module).__name__}.optimizer_zero_grad"
        ):
            zero(*arguments[:3])

    module.optimizer_step = optimizer_step  # type: ignore[method-assign,assignment]
    # Gradients were already freed at the end of the last step.
    module.optimizer_zero_grad = _do_nothing  # type: ignore[method-assign]


class Announcement(Observer):
    """Prints the banner of the run, once the recorder knows what is measured."""

    def run_started(self) -> None:
        # The measurement goes on if the output cannot be written; the command says so at its end.
        with suppress(OSError):
            give(Answer(banner(self.run)), Output())


@dataclass
class Measurement:
    """One measurement, from settings to the closed record.

    Attributes:
        command: `fit`, or `validate` for inference.
        model: the class of the model.
        settings: the settings of the measurement itself.
        rooms: settings of rooms, by the room's name: `{"memory": {"history": True, "steps": 3}}`.
        facts: further fields of the record, such as the command line.
        text: YAML that repeats the run.
        mode: the mode that is measured; `validate` sets inference.
        zero_grad: `after_step` or `native`; the setting `auto` is resolved by the model class.
        recorder: writes the run's record and folder.

    Raises:
        UsageError: `fit` was asked to measure inference.
    """

    command: str
    model: type
    settings: MeasureSettings
    rooms: Values = field(default_factory=dict)
    facts: Values = field(default_factory=dict)
    text: str | None = None

    def __post_init__(self) -> None:
        settings = self.settings
        self.mode = settings.mode if self.command == "fit" else "inference"
        if self.command == "fit" and self.mode == "inference":
            raise UsageError("measure.mode is inference, which fit cannot measure; use `lmbench validate`")
        self.zero_grad: str = settings.zero_grad
        if self.zero_grad == "auto":
            # lmbench reorders the step of its own models only; a user's module is measured as it is.
            self.zero_grad = "after_step" if issubclass(self.model, tuple(OWN_DATA)) else "native"
        facts = {
            "mode": self.mode, "matmul_precision": settings.matmul_precision, "zero_grad": self.zero_grad,
            "strict": settings.strict, **self.facts,
        }  # fmt: skip
        # Made before the model, so that a failure to build the model is recorded too.
        self.recorder = RunRecorder(settings.results_dir, facts, self.text, settings.run_id)

    @exits_raised()
    def run(
        self,
        build: Callable[[], tuple[LightningModule, Any, PhaseTimer, Values]],
        seed: int | bool | None = 0,
        announces: bool = False,
        **options: Any,
    ) -> BaseException | None:
        """Build model, data and Trainer, measure, and close the record.

        Returns the exception that ended the run, or None if training ended by itself.

        Args:
            build: returns the module, its data (a LightningDataModule, a loader, or None for the module's own loaders),
                the timer and the Trainer's flags.
            seed: the run's seed; true draws a random seed, None and false set no seed.
            announces: print the run's banner and a progress line.
            options: arguments of `Trainer.fit` or `validate`, such as `ckpt_path`.

        Raises:
            UsageError: no result folder exists yet, and it cannot be made.
        """
        one_process = OneProcess()
        try:
            if seed is not None and seed is not False:
                seed_everything(None if seed is True else seed, workers=True, verbose=False)
            torch.set_float32_matmul_precision(self.settings.matmul_precision)
            module, data, timer, flags = build()
            if self.settings.blocks is not None:
                AlikeBlocks(module, self.settings.blocks)
                module.flops_per_token = None  # type: ignore[assignment]  # It counts all blocks.
            user = [*as_list(flags.get("callbacks")), timer]
            trainer = self._trainer({**flags, "callbacks": [one_process, *self._callbacks(user, announces)]})
            # Create the device's context now, so that its time is not attributed to the model.
            synchronize(trainer.strategy.root_device)
            apply_mode(module, self.mode, self.zero_grad)
            if self.command == "fit":
                trainer.fit(module, data, **options)
            else:
                trainer.limit_val_batches = trainer.limit_val_batches or 1.0
                trainer.validate(module, data, **options)
            if self.recorder.exit_code is None:
                # Without a batch Lightning calls no hook of the loop, so no callback noticed.
                raise UsageError("nothing was measured: no batch was taken (empty data, or max_epochs or a limit is 0)")
        except BaseException as error:
            one_process.check()
            failure = error
            if received() is None and is_checkpoint_mismatch(error):
                reason = str(error).splitlines()[:2][-1].strip()
                failure = UsageError(f"the checkpoint is of another model: {reason[:200]}")
            with held():
                self.recorder.end_by(failure)
            return failure
        finally:
            one_process.is_over = True
        return None

    def _trainer(self, flags: Values) -> Any:
        """The Trainer with these flags.

        Raises:
            UsageError: two of its instruments disturb each other.
        """
        trainer: Any = BenchTrainer(**flags)
        has_history = any(isinstance(callback, MemoryHistory) for callback in trainer.callbacks)
        if has_history and type(trainer.profiler) is not PassThroughProfiler:
            raise UsageError("memory.history and trainer.profiler disturb each other; give one of them")
        if not self.settings.sigterm_broadcast:
            # Leave out a broadcast that the host waits for in each batch; `run_ranks`, or the launcher, ends all ranks.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _do_nothing
            if is_listening():
                # Lightning's handler would wait in a broadcast for ranks that got no signal, before ours is called.
                trainer._signal_connector._sigterm_notifier_fn = _do_nothing
        return trainer

    def _callbacks(self, user: list[Callback], announces: bool) -> list[Callback]:
        """All callbacks of the Trainer, in their order."""
        schedule = self.settings
        instruments, turns = list[Callback](), TurnTaking.of_environment()
        for room in ROOMS:
            options = self.rooms.get(room.name, {})
            if room.observer and options.get(room.switch):
                arguments = {name: options[name] for name in room.arguments}
                instruments.append(room.load("observer")(**arguments))
                if "steps" in arguments:
                    schedule = replace(schedule, steps=arguments["steps"], min_window_s=0.0)
        return [
            # First, so that the timer does not see them switch on and off.
            *instruments,
            *user,
            MemoryRecorder(),
            TrainingCheck(),
            SyncFinder(),
            *([LoaderProbe()] if self.settings.loader else []),
            *([GradientNorm()] if self.settings.gradient_norm and self.mode == "train_step" else []),
            # Last of the callbacks that act before the window, so that its power reading is close to the window.
            ThroughputMeter(),
            self.recorder,
            *([Announcement(), ProgressLine()] if announces else []),
            *([Turns(turns)] if turns else []),
            MeasurementSession(schedule),
        ]


def complete_record(recorder: RunRecorder, is_predicted: bool = False) -> None:
    """Add to a closed run's record the figures of its passes and, if `is_predicted`, a prediction of its memory.

    A pass is read only for the outcomes that it names: reading a large trace of a failed run is not worth the wait.
    """
    if recorder.folder is None:
        return
    run, path = recorder.run, recorder.folder.path
    for room in ROOMS:
        if room.reader and run.outcome in room.outcomes and recording_of(run, room):
            record = value_at(run, room.field) or ({} if room in INSTALLED else room.load("record")())
            failure = f"the {room.noun} could not be examined"
            _complete(recorder, room.field, record, failure, partial(room.load("reader"), path))
    if is_predicted and run.outcome in ("ok", "oom"):
        failure = "its memory could not be predicted"
        _complete(recorder, "memory_prediction", MemoryPrediction(), failure, partial(_prediction, run, path))


def _complete(
    recorder: RunRecorder,
    field: str,
    empty: Any,
    failure: str,
    read: Callable[[], tuple[Any, list[Guard]]],
) -> None:
    """Fill the record's `field` with what `read` returns, and tell the user if that fails.

    If `read` raises, the field gets `empty` with `failure` and the error as its reason.
    """
    reason = ""
    try:
        try:
            content, guards = read()
        except Exception as error:
            reason = error_line(error)
            noted = {"reason": f"{failure}: {reason[:200]}"}
            content, guards = ({**empty, **noted} if isinstance(empty, dict) else replace(empty, **noted)), []
        recorder.complete(field, content, guards)
    except OSError as error:
        reason = f"run.json cannot be written: {error.strerror}"
    except (KeyboardInterrupt, SystemExit):
        reason = "interrupted"
    if reason:
        tell(f"the run is complete; {failure}: {reason}")


def _prediction(run: RunRecord, path: Path) -> tuple[MemoryPrediction, list[Guard]]:
    """Predict the run's memory from its configuration, with the error against the measured peak.

    A run that ran out of memory has no measured peak, and its prediction no error.

    Raises:
        UsageError: the run is one of `lmbench validate`, which trains nothing.
        ProcessFailed: the predicting process failed.
    """
    if run.command != "fit":
        raise UsageError(f"{run.command} trains nothing; lmbench fit does")
    gpu = gpu_of(run)
    forecast = ask_forecast(["--config", str(path / "config.yaml")], Request([] if gpu is None else [gpu]))
    phases: PerPhase[int] = PerPhase()
    for peak in forecast.phases:
        phases.set(peak.phase, peak.total_bytes)
    peak_bytes, measured_bytes = forecast.highest.total_bytes, run.memory.steady_peak_allocated_bytes
    prediction = MemoryPrediction(
        method=forecast.method,
        peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=forecast.reserved_bytes,
        phase_peak_allocated_bytes=phases,
        error_fraction=peak_bytes / measured_bytes - 1 if measured_bytes else None,
    )
    return prediction, []
