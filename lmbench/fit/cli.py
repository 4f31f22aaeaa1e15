"""`lmbench fit`, `validate` and `test`: LightningCLI with a measurement around it."""

from __future__ import annotations

import os
import warnings
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lmbench.callbacks import (
    MeasurementSession,
    MemoryRecorder,
    Milestones,
    PhaseTimer,
    ProgressLine,
    QuietHost,
    RunRecorder,
    SyncFinder,
    ThroughputMeter,
    TrainingCheck,
)
from lmbench.data.datamodule import TokenData
from lmbench.fit.announcement import Announcement
from lmbench.fit.choice import choose
from lmbench.fit.modes import apply_mode
from lmbench.fit.refusals import about_checkpoint, refuse
from lmbench.fit.settings import MeasureSettings
from lmbench.fit.trainer import TRAINER_DEFAULTS, BenchTrainer
from lmbench.fit.words import check_variables
from lmbench.measure.clock import synchronize
from lmbench.measure.milestones import reach
from lmbench.model.language_model import LanguageModel
from lmbench.records.codec import as_dict
from lmbench.wandb.publish import WandbSettings


class BenchCLI(LightningCLI):
    """Parses, builds and runs one measurement. `recorder` is there once the command line is understood."""

    recorder: RunRecorder | None = None

    def __init__(self, args: list[str], announces: bool = False) -> None:
        self.argv = args
        self.announces = announces
        self.choice = choose(args, os.environ)
        model, data = self.choice.model, self.choice.data
        super().__init__(
            # A class that was named is a subclass to the parser, with `class_path` and `init_args`.
            model_class=LightningModule if model.is_named else LanguageModel,
            subclass_mode_model=model.is_named,
            datamodule_class=None if data.used is None else LightningDataModule if data.is_named else TokenData,
            subclass_mode_data=data.is_named,
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
        parser.add_class_arguments(WandbSettings, "wandb")
        parser.add_lightning_class_args(PhaseTimer, "timer")
        for source, target in self.choice.links():
            parser.link_arguments(source, target)

    def options(self, command: str) -> list[str]:
        """The command's options, without the arguments of classes that were named."""
        names = self._subcommand_parsers[command]._option_string_actions
        return [name[2:] for name in names if name.startswith("--")]

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        command = self.argv[0]
        check_variables(os.environ, command, self.subcommands(), self.options(command))
        # The warning is about scripts that pass both; here `args` is the command line.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            super().parse_arguments(parser, args)

    def _parse_ckpt_path(self) -> None:
        config = self.config[self.config.subcommand]
        refuse(config)
        try:
            super()._parse_ckpt_path()
        except (UnpicklingError, EOFError, RuntimeError) as error:
            raise about_checkpoint(config.ckpt_path, error) from error

    def before_instantiate_classes(self) -> None:
        self.settings = settings = MeasureSettings(**self.config[self.subcommand].measure.as_dict())
        if settings.zero_grad == "auto":
            settings.zero_grad = "after_step" if self.choice.model.is_own else "native"
        self.mode = settings.mode_of(str(self.subcommand))
        torch.set_float32_matmul_precision(settings.matmul_precision)
        config = self.config[self.subcommand]
        self.wandb = WandbSettings(**config.wandb.as_dict())
        self.filing = self.wandb.filing()
        if settings.run_id is not None:
            # A replay is a run of its own, outside of the sweep that gave this one its place.
            config.measure.run_id, config.measure.results_dir = None, MeasureSettings.results_dir
        self._dump_config()
        # Without the targets of links: they follow from their sources and may not be set by hand.
        config_yaml = self._parser(self.subcommand).dump(
            self.config[self.subcommand], skip_link_targets=True, skip_none=False
        )
        # From here on a failure has somewhere to be recorded, also that of building the model.
        self.recorder = RunRecorder(settings.results_dir, self._recorded_facts(), config_yaml, settings.run_id)

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
            Milestones(),
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
            "wandb": as_dict(self.filing),
        }

    def after_instantiate_classes(self) -> None:
        reach("parsed")
        # Makes the device's context now, so that its time is not taken for the model's.
        synchronize(self.trainer.strategy.root_device)
        reach("device_ready")
        apply_mode(self.model, self.mode, self.settings.zero_grad)

    def before_validate(self) -> None:
        self.trainer.limit_val_batches = self.trainer.limit_val_batches or 1.0


def _parser_kwargs() -> dict[str, Any]:
    each = {"exit_on_error": False, "default_env": True, "env_prefix": "LMBENCH"}
    return {**each, **{name: dict(each) for name in ("fit", "validate", "test")}}
