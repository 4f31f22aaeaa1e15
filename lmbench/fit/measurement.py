"""The front door: one measurement, the same for a command line, a sweep's cell and a call in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.profilers import PassThroughProfiler

from lmbench.callbacks import (
    GradientNorm,
    MeasurementSession,
    MemoryHistory,
    MemoryRecorder,
    Observer,
    ProgressLine,
    QuietHost,
    RunRecorder,
    SyncFinder,
    ThroughputMeter,
    TrainingCheck,
)
from lmbench.errors import UsageError
from lmbench.fit.choice import OWN_DATA
from lmbench.fit.modes import apply_mode
from lmbench.fit.settings import MeasureSettings
from lmbench.fit.trainer import BenchTrainer
from lmbench.instruments.clock import synchronize
from lmbench.instruments.ending import is_of_other_checkpoint
from lmbench.instruments.milestones import reach
from lmbench.interruption import held, received
from lmbench.records.passes import PASSES
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.vocabulary import RUNNING
from lmbench.report.answer import Answer
from lmbench.report.render import Output, give
from lmbench.report.run import banner


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
        self.mode = settings.mode_of(self.command)
        self.zero_grad: str = settings.zero_grad
        if self.zero_grad == "auto":
            # Only of its own models lmbench knows every line, and may move what it does.
            self.zero_grad = "after_step" if issubclass(self.model, tuple(OWN_DATA)) else "native"
        given = RunRecord(
            SCHEMA_VERSION,
            RUNNING,
            mode=self.mode,
            matmul_precision=settings.matmul_precision,
            zero_grad=self.zero_grad,
            strict=settings.strict,
            **self.facts,
        )
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
            if any(isinstance(callback, MemoryHistory) for callback in trainer.callbacks):  # type: ignore[attr-defined]
                if trainer.strategy.root_device.type != "cuda":
                    raise UsageError(
                        "memory.history is true, and this run is on a CPU: the history is of a GPU's allocator; on a "
                        "CPU `lmbench memory --config ...` predicts"
                    )
                if type(trainer.profiler) is not PassThroughProfiler:  # type: ignore[attr-defined]
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
                failure = UsageError(f"the checkpoint is of another model: {str(error).splitlines()[1].strip()[:200]}")
            with held():
                self.recorder.end_by(failure)
            return failure
        return None

    def _callbacks(self, user: Sequence[Callback], announces: bool) -> list[Callback]:
        """All callbacks of the Trainer, in their order."""
        schedule, settings = self.settings.schedule(), self.settings
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
            QuietHost(),
            MemoryRecorder(),
            TrainingCheck(),
            SyncFinder(),
            *([GradientNorm()] if settings.gradient_norm and self.mode == "train_step" else []),
            # Last of those that work before the window, so that its power reading is next to the window's start.
            ThroughputMeter(),
            self.recorder,
            *([Announcement(), ProgressLine()] if announces else []),
            MeasurementSession(schedule),
        ]
