"""`lmbench fit` and `validate`: LightningCLI with a measurement around it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from enum import Enum
from pickle import UnpicklingError
from typing import Any

import torch
import yaml
from jsonargparse import set_dumper
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.profilers import PassThroughProfiler

from lmbench.callbacks import DtypeRecorder, MemoryHistory, PhaseTimer, RunRecorder
from lmbench.errors import UsageError
from lmbench.fit.choice import LOADERS, OWN_DATA, ChoiceParser, choose_own, model_class, settle, without_own_classes
from lmbench.fit.harness import measuring_callbacks
from lmbench.fit.left_out import named_classes
from lmbench.fit.messages import about_checkpoint
from lmbench.fit.modes import apply_mode
from lmbench.fit.settings import DtypeSettings, MeasureSettings, MemorySettings, refuse
from lmbench.fit.trainer import TRAINER_DEFAULTS, BenchTrainer
from lmbench.instruments.clock import synchronize
from lmbench.instruments.milestones import reach
from lmbench.masking import MASK, keep_secret, masked, masked_words, secrets_of, to_fill_in
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.vocabulary import RUNNING
from lmbench.standard_output import write_result
from lmbench.wandb.publish import WandbSettings

# By command, what `LightningCLI.setup_parser` makes: of every BenchCLI it is the same.
_parsers: dict[str, tuple[LightningArgumentParser, dict[str, LightningArgumentParser], dict[str, list[str]]]] = {}


# libyaml, where it is there, takes a fifth of the time.
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_SafeDumper):  # type: ignore[misc]
    """Writes a member of an enumeration, where that is the default of something typed as text, as what it stands for:
    Lightning's Timer has one."""


_Dumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))


def _as_yaml(content: Any) -> str:
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False)
    return text


set_dumper("yaml", _as_yaml)


class BenchCLI(LightningCLI):
    """Parses, builds and runs one measurement. `recorder` is there once the command line is understood.

    Args:
        args: the words, a command first.
        announces: print what is about to be measured, and how far it is.
        only_settings: print the settings and raise `SystemExit`.
    """

    recorder: RunRecorder | None = None

    def __init__(self, args: list[str], announces: bool = False, only_settings: bool = False) -> None:
        self.argv = args
        self.announces = announces
        self.only_settings = only_settings
        super().__init__(
            trainer_class=BenchTrainer,
            trainer_defaults=TRAINER_DEFAULTS,
            save_config_callback=None,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_class=ChoiceParser,
            parser_kwargs={"prog": "lmbench", "exit_on_error": False, args[0]: {"exit_on_error": False}},
            args=args,
        )

    def setup_parser(self, *args: Any) -> None:
        """A command has one parser in a process: a sweep's server has built it for all its forks."""
        command = self.argv[0]
        if command not in _parsers:
            super().setup_parser(*args)
            _parsers[command] = self.parser, self._subcommand_parsers, self._subcommand_method_arguments
        self.parser, self._subcommand_parsers, self._subcommand_method_arguments = _parsers[command]
        parser = self._subcommand_parsers[command]
        choose_own(parser)
        if isinstance(parser, ChoiceParser) and {"-h", "--help"} & set(self.argv):
            parser.tell_of(named_classes(self.argv))

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The one command that is run: each has a parser of its own, which takes a third of a second to build."""
        skip = {"model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule"}
        return {command: skip for command in LOADERS if command == self.argv[0]}

    def add_core_arguments_to_parser(self, parser: ChoiceParser) -> None:  # type: ignore[override]
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})
        parser.add_choices()

    def add_arguments_to_parser(self, parser: ChoiceParser) -> None:  # type: ignore[override]
        parser.add_class_arguments(MeasureSettings, "measure")
        parser.add_class_arguments(MemorySettings, "memory")
        parser.add_class_arguments(DtypeSettings, "dtypes")
        parser.add_class_arguments(WandbSettings, "wandb")
        parser.add_lightning_class_args(PhaseTimer, "timer")

    def options(self) -> list[str]:
        """The command's options, without those of model and data."""
        names = self._subcommand_parsers[self.argv[0]]._option_string_actions
        return [name[2:] for name in names if name.startswith("--")]

    def parse_arguments(self, parser: ChoiceParser, args: Any) -> None:  # type: ignore[override]
        command = self.argv[0]
        self.config = parser.parse_args(args, defaults=False)
        given, loader = self.config[command], LOADERS[command]
        self.config[command], self.followed = settle(self._subcommand_parsers[command], given, loader)
        refuse(self.config[command])
        asked = [word for word in args if word.partition("=")[0] == "--measure.mode"]
        if command != "fit" and asked and given.get("measure.mode") != "inference":
            # In a file it is that of its training, which may be measured as well.
            raise UsageError(
                f"measure.mode is {given.measure.mode}, and {command} measures inference; use `lmbench fit`"
            )
        if self.only_settings:
            self._dump_config()
            write_result(self.settings_yaml)
            raise SystemExit

    def _dump_config(self) -> None:
        # As Lightning does, but by the command's own parser, which has to look for less.
        command = self.argv[0]
        parser = self._subcommand_parsers[command]
        dumped = parser.dump(self.config[command], skip_link_targets=False, skip_none=False, format="yaml")
        self.config_dump = yaml.load(dumped, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        repeating = deepcopy(self.config_dump)
        for key, name in self.followed:
            del repeating[key]["init_args"][name]
        # A file that repeats the run: what follows from another setting is left out, so that this can be overridden.
        self.settings_yaml = _as_yaml(masked(without_own_classes(repeating)))
        self.config_dump = without_own_classes(self.config_dump)
        keep_secret(value for _, value in secrets_of(self.config_dump))

    def _parse_ckpt_path(self) -> None:
        try:
            super()._parse_ckpt_path()
        except (UnpicklingError, EOFError, RuntimeError) as error:
            raise about_checkpoint(self.config[self.config.subcommand].ckpt_path, error) from error

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        self.settings = settings = MeasureSettings(**config.measure.as_dict())
        if settings.zero_grad == "auto":
            # Only of its own models lmbench knows every line, and may move what it does.
            is_own = issubclass(model_class(config), tuple(OWN_DATA))
            settings.zero_grad = "after_step" if is_own else "native"
        self.mode = settings.mode_of(str(self.subcommand))
        torch.set_float32_matmul_precision(settings.matmul_precision)
        self.memory = MemorySettings(**config.memory.as_dict())
        self.wandb = WandbSettings(**config.wandb.as_dict())
        self.filing = self.wandb.filing()
        if settings.run_id is not None:
            # A replay is a run of its own, outside of the sweep that gave this one its place.
            config.measure.run_id, config.measure.results_dir = None, MeasureSettings.results_dir
        self._dump_config()
        if missing := to_fill_in(self.config_dump):
            raise UsageError(
                f"{' and '.join(missing)}: {MASK} stands for a secret, which no result keeps; give its value, "
                f"such as --{missing[0]} VALUE"
            )
        # From here on a failure has somewhere to be recorded, also that of building the model.
        self.recorder = RunRecorder(settings.results_dir, self._given(), self.settings_yaml, settings.run_id)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        settings = self.settings
        assert self.recorder is not None
        schedule = settings.schedule()
        history = []
        if self.memory.history:
            history = [MemoryHistory(self.memory.steps, self.memory.max_entries)]
            schedule = replace(schedule, steps=self.memory.steps, min_window_s=0.0)
        dtypes = [DtypeRecorder()] if self.config[self.subcommand].dtypes.record else []
        callbacks = measuring_callbacks(
            self.recorder,
            schedule,
            callbacks,
            before=[*history, *dtypes],
            with_gradient_norm=settings.gradient_norm and self.mode == "train_step",
            announces=self.announces,
        )
        return super()._instantiate_trainer(config, callbacks)

    def _given(self) -> RunRecord:
        return RunRecord(
            SCHEMA_VERSION,
            RUNNING,
            command=self.subcommand,
            argv=masked_words(self.argv),
            config=masked(self.config_dump),
            mode=self.mode,
            matmul_precision=self.settings.matmul_precision,
            zero_grad=self.settings.zero_grad,
            strict=self.settings.strict,
            wandb=self.filing,
        )

    def after_instantiate_classes(self) -> None:
        reach("parsed")
        # Makes the device's context now, so that its time is not taken for the model's.
        synchronize(self.trainer.strategy.root_device)
        reach("device_ready")
        self._check_history()
        apply_mode(self.model, self.mode, self.settings.zero_grad)

    def _check_history(self) -> None:
        if not self.memory.history:
            return
        if self.trainer.strategy.root_device.type != "cuda":
            raise UsageError(
                "memory.history is true, and this run is on a CPU: the history is of a GPU's allocator; on a CPU "
                "`lmbench memory --config ...` predicts"
            )
        profiler = self.trainer.profiler  # type: ignore[attr-defined]
        if type(getattr(profiler, "inner", profiler)) is not PassThroughProfiler:
            raise UsageError("memory.history and trainer.profiler disturb each other; give one of them")

    def before_validate(self) -> None:
        self.trainer.limit_val_batches = self.trainer.limit_val_batches or 1.0
