"""`lmbench fit`, `validate` and `test`: LightningCLI with a measurement around it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lmbench.bench.announcement import Announcement
from lmbench.bench.modes import apply_mode
from lmbench.bench.settings import MeasureSettings
from lmbench.bench.trainer import TRAINER_DEFAULTS, BenchTrainer
from lmbench.callbacks import (
    MeasurementSession,
    MemoryRecorder,
    PhaseTimer,
    ProgressLine,
    QuietHost,
    RunRecorder,
    SyncFinder,
    ThroughputMeter,
    TrainingCheck,
)
from lmbench.data.datamodule import TokenData
from lmbench.model.language_model import LanguageModel


class BenchCLI(LightningCLI):
    """Parses, builds and runs one measurement. `recorder` is there once the command line is understood."""

    recorder: RunRecorder | None = None

    def __init__(self, args: list[str], announces: bool = False) -> None:
        self.argv = args
        self.announces = announces
        super().__init__(
            model_class=LanguageModel,
            datamodule_class=TokenData,
            trainer_class=BenchTrainer,
            trainer_defaults=TRAINER_DEFAULTS,
            save_config_callback=None,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs=_parser_kwargs(),
            args=args,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        skip = {"model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule"}
        return dict.fromkeys(("fit", "validate", "test"), skip)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(MeasureSettings, "measure")
        parser.add_lightning_class_args(PhaseTimer, "timer")
        parser.link_arguments("data.context_length", "model.context_length")
        parser.link_arguments("model.vocab_size", "data.vocab_size")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # The warning is about scripts that pass both; here `args` is the command line.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            super().parse_arguments(parser, args)

    def before_instantiate_classes(self) -> None:
        self.settings = settings = MeasureSettings(**self.config[self.subcommand].measure.as_dict())
        self.mode = settings.mode_of(str(self.subcommand))
        torch.set_float32_matmul_precision(settings.matmul_precision)
        self._dump_config()
        # Without the targets of links: they follow from their sources and may not be set by hand.
        config_yaml = self._parser(self.subcommand).dump(
            self.config[self.subcommand], skip_link_targets=True, skip_none=False
        )
        # From here on a failure has somewhere to be recorded, also that of building the model.
        self.recorder = RunRecorder(settings.results_dir, self._recorded_facts(), config_yaml)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        settings = self.settings
        assert self.recorder is not None
        callbacks = [
            *callbacks,
            *([] if settings.gc_in_window else [QuietHost()]),
            MemoryRecorder(),
            TrainingCheck(),
            SyncFinder(),
            # Last of those that work before the window, so that its power reading is next to the window's start.
            ThroughputMeter(),
            self.recorder,
            *([Announcement(self.recorder), ProgressLine()] if self.announces else []),
            MeasurementSession(settings.schedule()),
        ]
        return super()._instantiate_trainer(config, callbacks)

    def _recorded_facts(self) -> dict[str, Any]:
        return {
            "command": self.subcommand,
            "argv": self.argv,
            "config": self.config_dump,
            "mode": self.mode,
            "matmul_precision": self.settings.matmul_precision,
            "zero_grad": self.settings.zero_grad,
            "strict": self.settings.strict,
        }

    def after_instantiate_classes(self) -> None:
        apply_mode(self.model, self.mode, self.settings.zero_grad)

    def before_validate(self) -> None:
        self.trainer.limit_val_batches = self.trainer.limit_val_batches or 1.0


def _parser_kwargs() -> dict[str, Any]:
    each = {"exit_on_error": False, "default_env": True, "env_prefix": "LMBENCH"}
    return {**each, **{name: dict(each) for name in ("fit", "validate", "test")}}
