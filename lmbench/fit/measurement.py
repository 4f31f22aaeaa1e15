"""The front door: one measurement, the same for a command line, a sweep's cell and a call in a notebook; what its mode
leaves out of the step, and what is worked out once its run is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.profilers import PassThroughProfiler
from torch.optim import Optimizer

from lmbench.callbacks import (
    CommunicationProbe,
    GradientNorm,
    MeasurementSession,
    MemoryHistory,
    MemoryRecorder,
    Observer,
    ProgressLine,
    RunRecorder,
    SyncFinder,
    ThroughputMeter,
    TrainingCheck,
)
from lmbench.errors import UsageError, tell
from lmbench.fit.choice import OWN_DATA
from lmbench.fit.settings import MeasureSettings
from lmbench.fit.trainer import BenchTrainer
from lmbench.instruments.clock import synchronize
from lmbench.instruments.ending import is_of_other_checkpoint
from lmbench.interruption import held, received
from lmbench.memory.forecast import Request, ask_forecast, gpu_of
from lmbench.model.attention_layer import AttentionLayer
from lmbench.python_process import ProcessFailed
from lmbench.records.field import PerPhase
from lmbench.records.measured import Guard, MemoryPrediction
from lmbench.records.passes import PASSES
from lmbench.records.process import reach
from lmbench.records.vocabulary import Mode
from lmbench.report.answer import Answer
from lmbench.report.render import Output, give
from lmbench.report.run import banner


def usual_mode(model: type) -> Mode:
    """What a module of this class is measured in unless a mode is set."""
    return "forward_backward" if issubclass(model, AttentionLayer) else "train_step"


def apply_mode(module: LightningModule, mode: str, zero_grad: str) -> None:
    """Change, on this instance only, what Lightning's loop does after the forward.

    `forward`: backward does nothing (the graph is built and dropped). `forward_backward`: the optimizer's step runs
    the closure alone, so gradients are computed and weights stay. With `zero_grad="after_step"` gradients are freed at
    the end of the step instead of between the next forward and backward. Other modes leave the module alone.

    Raises:
        UsageError: the module optimizes by hand, where nothing of this can be changed from outside, or has nothing to
            optimize.
    """
    if mode == "train_step" and isinstance(module, AttentionLayer):
        raise UsageError(
            "measure.mode is train_step, and attention by itself has nothing to optimize; allowed: forward, "
            "forward_backward"
        )
    setting, allowed = "", "train_step"
    if mode != "train_step":
        setting = f"mode is {mode}" if mode != "inference" else ""
    elif zero_grad == "after_step":
        setting, allowed = f"zero_grad is {zero_grad}", "native"
    if setting and not module.automatic_optimization:
        raise UsageError(
            f"measure.{setting}, but {type(module).__name__} optimizes by hand (automatic_optimization is False); "
            f"allowed: {allowed}"
        )
    if mode == "forward":
        module.backward = _nothing  # type: ignore[method-assign]
    if mode in ("forward", "forward_backward"):
        module.optimizer_step = _closure_only  # type: ignore[method-assign,assignment]
    if zero_grad == "after_step" and mode in ("forward_backward", "train_step"):
        _zero_after_step(module)


def _nothing(*_: Any, **__: Any) -> None:
    """What a mode leaves out."""


def _closure_only(epoch: int, batch_idx: int, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
    """Forward and backward are in the closure; the update is left out."""
    if closure is not None:
        closure()


def _zero_after_step(module: LightningModule) -> None:
    step, zero = module.optimizer_step, module.optimizer_zero_grad

    def optimizer_step(*arguments: Any) -> None:
        """`arguments` are epoch, index of the batch, optimizer and closure."""
        step(*arguments)
        # Under the name Lightning gives this action, so that every profiler sees it as what it is.
        with module.trainer.profiler.profile(  # type: ignore[attr-defined]
            f"[LightningModule]{type(module).__name__}.optimizer_zero_grad"
        ):
            zero(*arguments[:3])

    module.optimizer_step = optimizer_step  # type: ignore[method-assign,assignment]
    # The gradients were freed when the last step ended.
    module.optimizer_zero_grad = _nothing  # type: ignore[method-assign]


class Announcement(Observer):
    """Prints what is about to be measured, once the recorder knows it."""

    def run_started(self) -> None:
        # An output that cannot be written is told of at the end; the measurement goes on.
        with suppress(OSError):
            give(Answer(banner(self.session.run)), Output())


@dataclass
class Measurement:
    """One measurement: from settings to the closed record.

    Attributes:
        command: `fit`, or `validate` for inference.
        model: the class of the model.
        settings: of the measurement itself.
        flags: of the Trainer.
        passes: settings of passes by their groups, `{"memory": {"history": True, "steps": 3}}`.
        facts: what else the record is told, such as the command line.
        text: YAML that repeats the run.
    """

    command: str
    model: type
    settings: MeasureSettings
    flags: dict[str, Any]
    passes: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None

    def __post_init__(self) -> None:
        settings = self.settings
        self.mode = settings.mode if self.command == "fit" else "inference"
        if self.command == "fit" and self.mode == "inference":
            raise UsageError("measure.mode is inference, which fit cannot measure; use `lmbench validate`")
        self.zero_grad: str = settings.zero_grad
        if self.zero_grad == "auto":
            # Only of its own models lmbench knows every line, and may move what it does.
            self.zero_grad = "after_step" if issubclass(self.model, tuple(OWN_DATA)) else "native"
        given = {
            "mode": self.mode, "matmul_precision": settings.matmul_precision, "zero_grad": self.zero_grad,
            "strict": settings.strict, **self.facts,
        }  # fmt: skip
        # From here on a failure has somewhere to be recorded, also that of building the model.
        self.recorder = RunRecorder(settings.results_dir, given, self.text, settings.run_id)

    def run(
        self,
        build: Callable[[], tuple[LightningModule, Any, Sequence[Callback]]],
        seed: int | bool | None = 0,
        announces: bool = False,
        **options: Any,
    ) -> BaseException | None:
        """Build model, data and callbacks, measure, and close the record; returns what ended the run, None if it ended
        by itself.

        Args:
            build: returns the module, its data (a LightningDataModule, a loader, or None for the module's own) and the
                user's callbacks.
            seed: of the run; true is a random one, None and false set none.
            announces: print what is about to be measured, and how far it is.
            options: of `Trainer.fit` or `validate`, such as `ckpt_path`.

        Raises:
            UsageError: there is no result folder yet, and none can be made.
        """
        try:
            if seed is not None and seed is not False:
                seed_everything(None if seed is True else seed, workers=True, verbose=False)
            torch.set_float32_matmul_precision(self.settings.matmul_precision)
            module, data, callbacks = build()
            trainer = BenchTrainer(**{**self.flags, "callbacks": self._callbacks(callbacks, announces)})
            reach("parsed")
            # Makes the device's context now, so that its time is not taken for the model's.
            synchronize(trainer.strategy.root_device)
            reach("device_ready")
            remembers = any(isinstance(callback, MemoryHistory) for callback in trainer.callbacks)  # type: ignore[attr-defined]
            if remembers and type(trainer.profiler) is not PassThroughProfiler:  # type: ignore[attr-defined]
                raise UsageError("memory.history and trainer.profiler disturb each other; give one of them")
            apply_mode(module, self.mode, self.zero_grad)
            if self.flags.get("compile"):
                # Each module that was measured before counts against Dynamo's limit of graphs for one piece of code.
                torch._dynamo.reset()
            datamodule, loaders = (data, None) if isinstance(data, LightningDataModule) else (None, data)
            if self.command == "validate":
                trainer.limit_val_batches = trainer.limit_val_batches or 1.0
            run_loop = trainer.fit if self.command == "fit" else trainer.validate
            run_loop(module, loaders, datamodule=datamodule, **options)
            if self.recorder.exit_code is None:
                # Without a batch Lightning has called no hook of the loop's.
                raise UsageError("nothing was measured: no batch was taken (empty data, or max_epochs or a limit is 0)")
        except BaseException as error:
            failure = error
            if received() is None and is_of_other_checkpoint(error):
                reason = str(error).splitlines()[:2][-1].strip()
                failure = UsageError(f"the checkpoint is of another model: {reason[:200]}")
            with held():
                self.recorder.end_by(failure)
            return failure
        return None

    def _callbacks(self, user: Sequence[Callback], announces: bool) -> list[Callback]:
        """All callbacks of the Trainer, in their order."""
        schedule = settings = self.settings
        instruments: list[Callback] = []
        for look in PASSES:
            group, _, switch = look.switch.partition(".")
            options = self.passes.get(group, {})
            if look.callback and options.get(switch):
                instrument = resolve_name(look.callback)(**{name: options[name] for name in look.arguments})
                instruments.append(instrument)
                if not look.has_timing:
                    schedule = replace(schedule, steps=instrument.steps, min_window_s=0.0)
        return [
            # In front of all, so that switching them on and off lies outside of what the timer sees.
            *instruments,
            *user,
            MemoryRecorder(),
            TrainingCheck(),
            SyncFinder(),
            CommunicationProbe(),
            *([GradientNorm()] if settings.gradient_norm and self.mode == "train_step" else []),
            # Last of those that work before the window, so that its power reading is next to the window's start.
            ThroughputMeter(),
            self.recorder,
            *([Announcement(), ProgressLine()] if announces else []),
            MeasurementSession(schedule),
        ]


def complete_record(recorder: RunRecorder, is_predicted: bool = False) -> None:
    """Complete a closed run's record with what its passes recorded, and with a prediction of its memory.

    A run that did not end well is left as it is: a trace may be large, and nobody waits for it.
    """
    run = recorder.run
    if recorder.folder is None:
        return
    for look in PASSES:
        if look.reader and run.outcome in look.outcomes and look.recorded(run):
            record = getattr(run, look.field) or look.content()
            failure = f"the {look.noun} could not be examined"
            _complete(recorder, look.field, record, failure, resolve_name(look.reader))
    if is_predicted and run.outcome in ("ok", "oom"):
        failure = "its memory could not be predicted"
        _complete(recorder, "memory_prediction", MemoryPrediction(), failure, lambda path: _prediction(recorder, path))


def _complete(
    recorder: RunRecorder,
    field: str,
    unread: Any,
    failure: str,
    read: Callable[[Path], tuple[Any, list[Guard]]],
) -> None:
    """Read, and write what was read into the record's `field`; `unread` with its reason where that fails."""
    assert recorder.folder is not None
    reason = ""
    try:
        try:
            part, guards = read(recorder.folder.path)
        except Exception as fault:
            is_expected = isinstance(fault, UsageError | ProcessFailed)
            reason = " ".join((str(fault) if is_expected else f"{type(fault).__name__}: {fault}").split())
            unread.reason = f"{failure}: {reason[:200]}"
            part, guards = unread, []
        recorder.complete(field, part, guards)
    except OSError as error:
        reason = f"run.json cannot be written: {error.strerror}"
    except (KeyboardInterrupt, SystemExit):
        reason = "interrupted"
    if reason:
        tell(f"the run is complete; {failure}: {reason}")


def _prediction(recorder: RunRecorder, path: Path) -> tuple[MemoryPrediction, list[Guard]]:
    """A prediction by the run's configuration, to hold its peak against; of a run that ran out of memory the prediction
    alone.

    Raises:
        UsageError: the run is one of `lmbench validate`, which trains nothing.
        ProcessFailed: the predicting process failed.
    """
    run = recorder.run
    if run.command != "fit":
        raise UsageError(f"{run.command} trains nothing; lmbench fit does")
    request = Request(gpu_of(run), finds_largest=False)
    forecast = ask_forecast(["--config", str(path / "config.yaml")], request)
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
