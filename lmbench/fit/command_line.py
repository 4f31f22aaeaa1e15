"""A command line of `lmbench fit` or `validate`, understood: settings to write down, and objects built of them."""

from __future__ import annotations

import json
import re
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_dumper, set_parsing_settings
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI, ReduceLROnPlateau, instantiate_class
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lmbench.callbacks import PhaseTimer
from lmbench.data.datamodule import TokenData
from lmbench.errors import UsageError, suggest
from lmbench.fit.choice import DEFAULTS, choose
from lmbench.fit.measurement import usual_mode
from lmbench.fit.settings import DtypeSettings, MeasureSettings, MemorySettings, refuse
from lmbench.fit.trainer import TRAINER_DEFAULTS, BenchTrainer
from lmbench.instruments.subject import path_of
from lmbench.masking import MASK, is_secret, keep_secret, masked, secrets_of, to_fill_in
from lmbench.wandb.publish import WandbSettings

#: Settings that both sides have: the side that is set, the side that follows, and the name.
FOLLOWING = (
    ("data", "model", "context_length"),
    ("data", "model", "batch_size"),
    ("model", "data", "vocab_size"),
)
_GROUPS: dict[str, type] = {
    "measure": MeasureSettings, "memory": MemorySettings, "dtypes": DtypeSettings, "wandb": WandbSettings,
    "timer": PhaseTimer,
}  # fmt: skip

#: By key, what LightningCLI's options of the same names may be, and the argument that they get when they are made.
_TRAINED_WITH: dict[str, tuple[tuple[type, ...], str]] = {
    "optimizer": ((Optimizer,), "params"),
    "lr_scheduler": ((LRScheduler, ReduceLROnPlateau), "optimizer"),
}

# Lightning's command line has allowed configurations to be addresses on the network.
set_parsing_settings(config_read_mode_fsspec_enabled=False)
# JSON is YAML. The default of something typed as text may be a member of an enumeration: Lightning's Timer has one.
set_dumper("yaml", partial(json.dumps, default=lambda member: member.value))


def _add(parser: ArgumentParser, key: str, used: type) -> None:
    parser.add_class_arguments(used, key, fail_untyped=False, instantiate=used is not BenchTrainer, sub_configs=True)


@cache
def _builder(key: str, used: type) -> ArgumentParser:
    """A parser of one class alone: to build its object, and nothing beside it with default settings."""
    parser = ArgumentParser(exit_on_error=False)
    _add(parser, key, used)
    return parser


@cache
def _parser(command: str, model: type, data: type | None) -> ArgumentParser:
    """The parser for two classes: built once in a process, so that a sweep's server has it for all its forks."""
    parser = ArgumentParser(prog=f"lmbench {command}", exit_on_error=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action="config", help="a YAML file, or a shipped configuration by its name")
    parser.add_argument("--seed_everything", type=bool | int, default=0, help="seed of the run; true is a random one")
    _add(parser, "trainer", BenchTrainer)
    parser.set_defaults({f"trainer.{name}": value for name, value in TRAINER_DEFAULTS.items()})
    skip: set[str | int] = {"model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule"}
    parser.add_method_arguments(BenchTrainer, command, skip=skip)
    for key, used in {**_GROUPS, "model": model, "data": data}.items():
        if used is not None:
            _add(parser, key, used)
    parser.set_defaults({"measure.mode": usual_mode(model)})
    for key, (kinds, argument) in _TRAINED_WITH.items():
        parser.add_subclass_arguments(
            kinds, key, required=False, instantiate=False, fail_untyped=False, skip={argument},
            help=f"the {key.replace('_', ' ').replace('lr', 'learning rate')} in place of the module's own",
        )  # fmt: skip
    return parser


def _configure_optimizers(module: LightningModule, optimizer: Namespace, lr_scheduler: Namespace | None) -> Any:
    """What `configure_optimizers` of a module returns that is trained with these, as LightningCLI does.

    Raises:
        UsageError: they refuse their settings, or the module's parameters.
    """
    given = optimizer
    try:
        used = instantiate_class(module.parameters(), optimizer.as_dict())
        if lr_scheduler is None:
            return used
        given = lr_scheduler
        return LightningCLI.configure_optimizers(module, used, instantiate_class(used, lr_scheduler.as_dict()))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{given.class_path} cannot be made for {type(module).__name__}: {error}") from error


class CommandLine:
    """A command line, understood.

    Args:
        command: `fit` or `validate`.
        words: configurations, classes and options.

    Attributes:
        config: every setting.
        ignored: what was left out of shipped configurations, in sentences.
        content: every setting as plain values, as the record keeps it.
        text: YAML that repeats the run; settings that follow from others are left out, so that those can be overridden.

    Raises:
        UsageError: something was not understood, or nothing can be measured with it.
        SystemExit: help was asked for, and printed.
    """

    def __init__(self, command: str, words: list[str]) -> None:
        # As in a file, whose classes have their arguments under `init_args`.
        self.words = [re.sub(r"^--(model|data)\.init_args\.", r"--\1.", word) for word in words]
        self.command = command
        self._choice = choice = choose(command, self.words)
        self.model, self.data, self.ignored = choice.model, choice.data, choice.ignored
        self._parser = _parser(command, choice.model, choice.data)
        for name in ("trainer", *_GROUPS):
            if any(name in content and content[name] is None for content in choice.settings):
                raise UsageError(f"{name} is null; leave it out, or give its settings")
        texts = [f"--config={json.dumps(content, default=str)}" for content in choice.settings]
        try:
            self.config = self._parser.parse_args([*texts, *choice.words])
            refuse(self.config)
        except ArgumentError as error:
            raise self._mistakes(error) from error
        self.config.pop("config", None)
        for key in _TRAINED_WITH:
            if self.config.get(key) is None:
                self.config.pop(key, None)
        if "lr_scheduler" in self.config and "optimizer" not in self.config:
            raise UsageError("lr_scheduler needs an optimizer, such as --optimizer torch.optim.SGD --optimizer.lr 0.1")
        self._follow()

    def _mistakes(self, error: ArgumentError) -> UsageError:
        """One line for what the parser refuses: every setting of a file that is wrong, with its place."""
        found = list[tuple[str, int, str]]()
        for content in self._choice.settings:
            for group, settings in content.items():
                # Each alone, since the parser ends with the first.
                named = settings if isinstance(settings, dict) else {"": settings}
                for key, value in named.items():
                    name = ".".join(filter(None, (group, key)))
                    try:
                        alone = {group: {key: value} if key else value}
                        self._parser.parse_args([f"--config={json.dumps(alone, default=str)}"])
                    except ArgumentError as refusal:
                        line = str(_translated(refusal, self._parser))
                        source, _, number = self._choice.places.get(name, "").rpartition(":")
                        # Others are about what is missing then.
                        if name in line and source:
                            found.append((source, int(number), line))
        lines = [f"{source}:{number}: {line}" for source, number, line in sorted(found)]
        first = str(_translated(error, self._parser))
        return UsageError("; ".join([*([] if any(first in line for line in lines) else [first]), *lines]))

    def _follow(self) -> None:
        """Let settings follow from those of the other side; `_followed` lists them as `("data", "vocab_size")`."""
        sides = {key: self.config.get(key) or {} for key in DEFAULTS}
        self._followed = list[tuple[str, str]]()
        following = [(source, target, name, None) for source, target, name in FOLLOWING]
        if self.data is TokenData and (data_settings := getattr(self.model, "data_settings", None)):
            known = data_settings(**vars(sides["model"]))
            following = [("", "data", name, value) for name, value in known.items()] + following
        for source, target, name, value in following:
            if source and (name not in sides[source] or name not in sides[target]):
                continue
            if not self._choice.is_set(target, name):
                sides[target][name] = sides[source][name] if source else value
                self._followed.append((target, name))
            elif source and path_of(getattr(self, target)).startswith("lmbench."):
                setting = f"--{source}.{name} {sides[target][name]}"
                raise UsageError(f"{target}.{name} follows {source}.{name}; set that: {setting}")

    def write(self) -> None:
        """Write the settings down as `content` and `text`.

        Raises:
            UsageError: a secret that no result keeps has to be filled in.
        """
        dumped = self._parser.dump(self.config, skip_none=False)
        repeating = json.loads(dumped)
        for key, name in self._followed:
            del repeating[key][name]
        self.content = self._with_classes(json.loads(dumped))
        self.text = yaml.safe_dump(masked(self._with_classes(repeating)), sort_keys=False)
        keep_secret(value for _, value in secrets_of(self.content))
        if missing := to_fill_in(self.content):
            raise UsageError(
                f"{' and '.join(missing)}: {MASK} stands for a secret, which no result keeps; give its value, "
                f"such as --{missing[0]} VALUE"
            )

    def _with_classes(self, content: dict[str, Any]) -> dict[str, Any]:
        """lmbench's own model and data are written without their classes, `model: {size: small}`."""
        content.setdefault("data", None)
        for key, default in DEFAULTS.items():
            used = getattr(self, key)
            if used not in (default, None):
                content[key] = {"class_path": path_of(used), "init_args": content.get(key) or {}}
        return content

    def build(self, key: str, **changes: Any) -> Any:
        """The object that a group of settings describes, of the Trainer its flags; `changes` are other arguments."""
        used = {**_GROUPS, "trainer": BenchTrainer, "model": self.model, "data": self.data}[key]
        if used is None:
            return None
        values = {**vars(self.config.get(key, SimpleNamespace())), **changes}
        try:
            built = _builder(key, used).instantiate_classes({key: values})[key]
            if key == "model" and (optimizer := self.config.get("optimizer")) is not None:
                scheduler = self.config.get("lr_scheduler")
                built.configure_optimizers = partial(_configure_optimizers, built, optimizer, scheduler)
            return built
        except ValueError as error:
            # jsonargparse's wrapping of whatever the constructor of a user's class raised.
            if "Union subtypes" in str(error) and error.__cause__ is not None:
                raise error.__cause__ from None
            raise


def settings_of(key: str, used: type, **values: Any) -> Any:
    """An object of settings from values that a caller of Python code gave.

    Raises:
        UsageError: a name or a value that the settings do not have.
    """
    builder = _builder(key, used)
    try:
        return builder.instantiate_classes(builder.parse_object({key: values}))[key]
    except ArgumentError as error:
        raise _translated(error, builder) from error


_VALUE = re.compile(r'(?:Parser key "(?P<name>[^"]+)":\s*)+.*?(?:Given|Got) value: (?P<value>[^\n]*)', re.DOTALL)
_OPTION_OF_CLASS = re.compile(r"Parser key \"([\w.]+)\".*class_path '([\w.]+)':\s*Option '([\w.]+)'", re.DOTALL)
_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "list": "a list"}


def _translated(error: ArgumentError, parser: ArgumentParser) -> UsageError:
    """One line for a complaint of the parser, with the option that a misspelt one was probably meant for."""
    name_first = "--{0}.{1} is an option of a class; name the class before it, as in --{0} CLASS"
    if of_class := _OPTION_OF_CLASS.search(str(error)):
        key, path, option = of_class.groups()
        # Without a class before it, it was looked for in the base class.
        is_base = path.endswith(("Optimizer", "LRScheduler"))
        return UsageError(name_first.format(key, option) if is_base else f"unknown option --{key}.{option} of {path}")
    text = re.sub(r"Group '([\w.]+)' does not accept option '", r"Option '\1.", str(error))
    if unknown := re.search(r"(?:unrecognized arguments: --|Option ')([\w.+]+)", text):
        options = [name.removeprefix("--") for name in parser._option_string_actions]
        hint = suggest(unknown[1], options, "--{}")
        return UsageError(f"unknown option --{unknown[1]}{hint} (`lmbench fit --help` lists them all)")
    if extra := re.search(r"unrecognized arguments: (\S+)", text):
        return UsageError(f"{extra[1]!r} is one word too many; a configuration comes first, options are --name value")
    rejected = _VALUE.search(text)
    if rejected is None:
        return UsageError(text)
    name, value = rejected["name"], repr(rejected["value"].strip())
    if nested := re.search(r"NestedArg\(key='(\w+)'", value):
        return UsageError(name_first.format(name, nested[1]))
    words = re.findall(r"[\w.-]+", ",".join(re.findall(r"Literal\[(.*?)\]", text)))
    types = [_TYPES.get(kind, kind) for kind in re.findall(r"Expected an? <class '(\w+)'>", text) if kind != "NoneType"]
    allowed = ", ".join(dict.fromkeys(words or types)) or text
    if name in _TRAINED_WITH:
        allowed = "a class of PyTorch's, or one with its module, such as torch.optim.SGD"
    return UsageError(f"{name} is {MASK if is_secret(name) else value}; allowed: {allowed}")
