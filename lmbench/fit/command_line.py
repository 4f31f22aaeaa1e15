"""Parse a command line of `lmbench fit` or `validate` into settings, write them down, and build objects from them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache, partial
from inspect import signature
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_dumper, set_parsing_settings
from lightning.pytorch import LightningModule, callbacks, loggers, strategies
from lightning.pytorch.cli import LightningCLI, ReduceLROnPlateau, instantiate_class
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lmbench.callbacks import PhaseTimer
from lmbench.data.datamodule import TokenData
from lmbench.errors import UsageError, import_named, suggest
from lmbench.fit.choice import DEFAULTS, choose, import_class
from lmbench.fit.measurement import usual_mode
from lmbench.fit.settings import MeasureSettings, check_settings
from lmbench.fit.trainer import TRAINER_DEFAULTS, BenchTrainer
from lmbench.instruments.subject import path_of
from lmbench.masking import MASK, is_secret, keep_secret, masked, secrets_of, to_fill_in
from lmbench.records.vocabulary import Values
from lmbench.rooms import ROOMS
from lmbench.wandb.publish import WandbSettings

#: Settings that model and data share: the group that is set, the group that follows it, and the setting's name.
FOLLOWING = (
    ("data", "model", "context_length"),
    ("data", "model", "batch_size"),
    ("model", "data", "vocab_size"),
)
_GROUPS: dict[str, type] = {
    "measure": MeasureSettings, **{room.name: room.load("settings") for room in ROOMS if room.settings},
    "wandb": WandbSettings, "timer": PhaseTimer,
}  # fmt: skip

#: LightningCLI's options `optimizer` and `lr_scheduler`: the allowed base classes, and the constructor argument that
#: lmbench fills in itself.
_TRAINED_WITH = {
    "optimizer": ((Optimizer,), "params"),
    "lr_scheduler": ((LRScheduler, ReduceLROnPlateau), "optimizer"),
}

# Importing Lightning's command line lets configurations be network addresses; undo that.
set_parsing_settings(config_read_mode_fsspec_enabled=False)
# Write JSON, which is valid YAML. `default` handles enumeration members, such as the interval of Lightning's Timer.
set_dumper("yaml", partial(json.dumps, default=lambda member: member.value))


def _add(parser: ArgumentParser, key: str, class_: type) -> None:
    is_instantiated = class_ is not BenchTrainer
    parser.add_class_arguments(class_, key, fail_untyped=False, instantiate=is_instantiated, sub_configs=True)


@cache
def _builder(key: str, class_: type) -> ArgumentParser:
    """A parser for one class alone, so that building its object builds no other group with default settings."""
    parser = ArgumentParser(exit_on_error=False)
    _add(parser, key, class_)
    return parser


@cache
def _parser(command: str, model: type, data: type | None) -> ArgumentParser:
    """The parser for one model class and one data class; cached, so that all forks of a sweep's server share it."""
    parser = ArgumentParser(prog=f"lmbench {command}", exit_on_error=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action="config", help="a YAML file, or a shipped configuration by its name")
    parser.add_argument("--seed_everything", type=bool | int, default=0, help="seed of the run; true is a random one")
    _add(parser, "trainer", BenchTrainer)
    parser.set_defaults({f"trainer.{name}": value for name, value in TRAINER_DEFAULTS.items()})
    skip = {"model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule"}
    parser.add_method_arguments(BenchTrainer, command, skip=skip)
    for key, class_ in {**_GROUPS, "model": model, "data": data}.items():
        if class_ is not None:
            _add(parser, key, class_)
    parser.set_defaults({"measure.mode": usual_mode(model)})
    for key, (kinds, argument) in _TRAINED_WITH.items():
        parser.add_subclass_arguments(
            kinds, key, required=False, instantiate=False, fail_untyped=False, skip={argument},
            help=f"the {key.replace('_', ' ').replace('lr', 'learning rate')} in place of the module's own",
        )  # fmt: skip
    return parser


def _configure_optimizers(module: LightningModule, optimizer: Namespace, lr_scheduler: Namespace | None) -> Any:
    """Stand in for the module's own `configure_optimizers` under `--optimizer`, and return what LightningCLI returns.

    Raises:
        UsageError: the optimizer or scheduler refuses its settings or the module's parameters.
    """
    settings = optimizer
    try:
        built_optimizer = instantiate_class(module.parameters(), optimizer.as_dict())
        if lr_scheduler is None:
            return built_optimizer
        settings = lr_scheduler
        scheduler = instantiate_class(built_optimizer, lr_scheduler.as_dict())
        return LightningCLI.configure_optimizers(module, built_optimizer, scheduler)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{settings.class_path} cannot be made for {type(module).__name__}: {error}") from error


class CommandLine:
    """A parsed command line.

    Args:
        command: `fit` or `validate`.
        words: configurations, classes and options.

    Attributes:
        config: every setting, as the parser's namespace.
        ignored: one sentence for each group of settings that was ignored in a shipped configuration.
        content: every setting as plain values, for the record; set by `write`.
        text: YAML that repeats the run; set by `write`. Settings that follow from others are left out, so that a later
            command line can override the others.

    Raises:
        UsageError: the parser refuses a setting, or nothing can be measured with the settings.
        SystemExit: the command line asked for help, which was printed.
    """

    def __init__(self, command: str, words: list[str]) -> None:
        # A configuration file puts a class's arguments under `init_args`; accept that form as an option too.
        self.words = [re.sub(r"^--(model|data)\.init_args\.", r"--\1.", word) for word in words]
        self.command = command
        self._print_help_of_class()
        self._choice = choice = choose(command, self.words)
        self.model, self.data, self.ignored = choice.model, choice.data, choice.ignored
        self._parser = _parser(command, choice.model, choice.data)
        for name in ("trainer", *_GROUPS):
            if any(name in content and content[name] is None for content in choice.settings):
                raise UsageError(f"{name} is null; leave it out, or give its settings")
        texts = [f"--config={json.dumps(content, default=str)}" for content in choice.settings]
        try:
            self.config = self._parser.parse_args([*texts, *choice.words])
            check_settings(self.config)
        except ArgumentError as error:
            raise self._mistake(error) from error
        self.config.pop("config", None)
        for key in _TRAINED_WITH:
            if self.config.get(key) is None:
                self.config.pop(key, None)
        if "lr_scheduler" in self.config and "optimizer" not in self.config:
            raise UsageError("lr_scheduler needs an optimizer, such as --optimizer torch.optim.SGD --optimizer.lr 0.1")
        self._follow()
        if missing := [name for key in DEFAULTS for name in self._missing(key)]:
            raise UsageError(f"the following arguments are required: {', '.join(missing)}")

    def _missing(self, key: str) -> Iterator[str]:
        """The arguments that the class needs and nobody gave; the parser takes None for those without a type."""
        values = vars(self.config.get(key) or SimpleNamespace())
        for name, parameter in signature(getattr(self, key)).parameters.items() if values else ():
            is_needed = parameter.default is parameter.empty and parameter.annotation is parameter.empty
            if is_needed and name in values and values[name] is None and not self._choice.is_set(key, name):
                yield f"{key}.{name}"

    def _print_help_of_class(self) -> None:
        """Print the options of one class, as `--model.help CLASS` asks, and end the command.

        Raises:
            SystemExit: the help was printed.
            UsageError: there is no such class.
        """
        for word, next_word in zip_longest(self.words, self.words[1:], fillvalue=""):
            option, _, path = word.partition("=")
            if option in ("--model.help", "--data.help"):
                key = option[2:-5]
                named = path or ("" if next_word.startswith("-") else next_word)
                others = [other for other in self.words if other != word]
                class_ = import_class(key, named) if named else getattr(choose(self.command, others), key)
                if class_ is None:
                    raise UsageError(f"{option}: there is no {key} class; name it, as in {option} my_file.MyClass")
                print(f"options of {path_of(class_)}:")
                _builder(key, class_).print_help()
                raise SystemExit(0)

    def _mistake(self, error: ArgumentError) -> UsageError:
        """One line for a wrong setting, with file and line where a configuration file has it."""
        line = str(_translated(error, self._parser))
        name = re.split("[ ;:]", line.removeprefix("unknown option --"))[0]
        is_option = any(word.startswith(f"--{name}") for word in self.words)
        place = None if is_option else self._choice.places.get(name)
        return UsageError(line if place is None else f"{place}: {line}")

    def _follow(self) -> None:
        """Derive unset settings of model and data from each other, and list them in `_followed`.

        Entries of `_followed` are group and name, `("data", "vocab_size")`.

        Raises:
            UsageError: a setting of lmbench's own classes is set on the group that follows.
        """
        groups = {key: self.config.get(key) or {} for key in DEFAULTS}
        self._followed = list[tuple[str, str]]()
        if self.data is TokenData and (data_settings := getattr(self.model, "data_settings", None)):
            for name, value in data_settings(**vars(groups["model"])).items():
                if not self._choice.is_set("data", name):
                    groups["data"][name] = value
                    self._followed.append(("data", name))
        for source, target, name in FOLLOWING:
            if name not in groups[source] or name not in groups[target]:
                continue
            if not self._choice.is_set(target, name):
                groups[target][name] = groups[source][name]
                self._followed.append((target, name))
            elif path_of(getattr(self, target)).startswith("lmbench."):
                setting = f"--{source}.{name} {groups[target][name]}"
                raise UsageError(f"{target}.{name} follows {source}.{name}; set that: {setting}")

    def write(self, skip_none: bool = False, skip_default: bool = False) -> None:
        """Set `content` and `text` from the settings; `text` is without nulls or defaults if they are skipped.

        Raises:
            UsageError: a setting holds the mask of a secret, which the user has to fill in.
        """
        dumped = self._parser.dump(self.config, skip_none=False)
        repeating = json.loads(self._parser.dump(self.config, skip_none=skip_none, skip_default=skip_default))
        for key, name in self._followed:
            repeating.get(key, {}).pop(name, None)
        self.content = self._with_classes(json.loads(dumped))
        self.text = yaml.safe_dump(masked(self._with_classes(repeating)), sort_keys=False)
        keep_secret(value for _, value in secrets_of(self.content))
        if missing := to_fill_in(self.content):
            raise UsageError(
                f"{' and '.join(missing)}: {MASK} stands for a secret, which no result keeps; give its value, "
                f"such as --{missing[0]} VALUE"
            )

    def _with_classes(self, content: Values) -> Values:
        """Add class paths to the settings, except for the default classes: `model: {size: small}`."""
        content.setdefault("data", None)
        for key, default in DEFAULTS.items():
            class_ = getattr(self, key)
            if class_ not in (default, None):
                content[key] = {"class_path": path_of(class_), "init_args": content.get(key) or {}}
        return content

    def build(self, key: str, **changes: Any) -> Any:
        """Build the object of one group of settings, or the flags for `trainer`; None for data that is not used.

        `changes` replace the group's settings by name.
        """
        class_ = {**_GROUPS, "trainer": BenchTrainer, "model": self.model, "data": self.data}[key]
        if class_ is None:
            return None
        values = {**vars(self.config.get(key, SimpleNamespace())), **changes}
        try:
            built = _builder(key, class_).instantiate_classes({key: values})[key]
            if key == "model" and (optimizer := self.config.get("optimizer")) is not None:
                scheduler = self.config.get("lr_scheduler")
                built.configure_optimizers = partial(_configure_optimizers, built, optimizer, scheduler)
            return built
        except ValueError as error:
            # jsonargparse wraps what the constructor of a user's class raised.
            if "Union subtypes" in str(error) and error.__cause__ is not None:
                raise error.__cause__ from None
            raise


def settings_of(key: str, class_: type, /, **values: Any) -> Any:
    """Build a settings object from the keyword arguments of a Python call.

    Raises:
        UsageError: the settings have no such name or refuse a value.
    """
    builder = _builder(key, class_)
    try:
        return builder.instantiate_classes(builder.parse_object({key: values}))[key]
    except ArgumentError as error:
        raise _translated(error, builder) from error


_VALUE = re.compile(r'(?:Parser key "(?P<name>[^"]+)":\s*)+.*?(?:Given|Got) value: (?P<value>[^\n]*)', re.DOTALL)
_OPTION_OF_CLASS = re.compile(r"Parser key \"([\w.]+)\".*?class_path '([\w.]+)':\s*Option '([\w.]+)'", re.DOTALL)
_VALUE_OF_CLASS = re.compile(
    r'Parser key "([\w.]+)":[^"]*given class_path \S+\s+Parser key "([\w.]+)":\s+(.*?)(?:Given|Got) value: (.*)'
)
#: What the parser says of a class that a setting such as trainer.callbacks names.
_WRONG_CLASS = re.compile(
    r"- (Problem with given class_path[^\n]+(?:\n\s+[^-\s][^\n]+)?|Import path [^\n]+|Not a valid \w+ of \w+)"
)
_NAME_FIRST = "--{0}.{1} is an option of a class; name the class before it, as in --{0} CLASS"
_TYPES = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "list": "a list",
    "Duration": "a time such as 90s, 10m or 2h",
}  # fmt: skip


def _translated(error: ArgumentError, parser: ArgumentParser) -> UsageError:
    """Translate the parser's error into one line for the user, with the nearest option where one is misspelt."""
    if wrong := _VALUE_OF_CLASS.search(str(error)):
        key, option, reason, value = wrong.groups()
        return _wrong_value(f"{key}.{option}", value, reason)
    if of_class := _OPTION_OF_CLASS.search(str(error)):
        key, path, option = of_class.groups()
        # Without a class before the option, the parser looks for it in the base class.
        is_base = path.endswith(("Optimizer", "LRScheduler"))
        return UsageError(_NAME_FIRST.format(key, option) if is_base else f"unknown option --{key}.{option} of {path}")
    text = re.sub(r"Group '([\w.]+)' does not accept option '", r"Option '\1.", str(error))
    if unknown := re.search(r"(?:unrecognized arguments: --|Option ')([\w.+]+)", text):
        options = [name.removeprefix("--") for name in parser._option_string_actions]
        hint = suggest(unknown[1], options, "--{}")
        return UsageError(f"unknown option --{unknown[1]}{hint} (`lmbench fit --help` lists them all)")
    if extra := re.search(r"unrecognized arguments: (\S+)", text):
        hint = f"; did you mean --{extra[1].lstrip('-')}?" if re.match(r"-?\w+\.\w+", extra[1]) else ""
        advice = f"a configuration comes first, options are --name value{hint}"
        return UsageError(f"{extra[1]!r} is one word too many; {advice}")
    rejected = _VALUE.search(text)
    return UsageError(text) if rejected is None else _wrong_value(rejected["name"], rejected["value"].strip(), text)


def _wrong_value(name: str, value: str, text: str) -> UsageError:
    """What is wrong with the value of a setting, from the parser's text."""
    if nested := re.search(r"NestedArg\(key='(\w+)'", value):
        return UsageError(_NAME_FIRST.format(name, nested[1]))
    if path := re.search(r"Expected a dot import path string: (\w+)", text):
        if path[1] in ("true", "false"):
            return UsageError(
                f"{name} is {path[1]}; give its options, as --{name}.OPTION (`lmbench fit --{name}.help` lists them)"
            )
        hint = suggest(path[1], (*callbacks.__all__, *loggers.__all__, *strategies.__all__))
        own = f"name your own with its module, as in my_file.{path[1]}"
        return UsageError(f"{name}: there is no class {path[1]!r}; {own}{hint}")
    words = re.findall(r"[\w.-]+", ",".join(re.findall(r"Literal\[(.*?)\]", text)))
    if path := re.search(r"given class_path '([\w.]+)':\s+module", text):
        try:
            import_named(name, path[1])
        except UsageError as error:
            return error
    wrong_class = _WRONG_CLASS.search(text)
    if wrong_class is not None and not words:
        return UsageError(f"{name}: {' '.join(wrong_class[1].split())}")
    kinds = re.findall(r"(?:Expected (?:an? )?<class '|Not of type )(\w+)", text)
    # Where words are allowed beside other types, these are of other settings if a text is among them,
    # and a number among the words is one of the words.
    is_named = "str" in kinds or any(word.isdigit() for word in words)
    types = [] if words and is_named else [_TYPES.get(kind, kind) for kind in kinds if kind != "NoneType"]
    allowed = ", ".join(dict.fromkeys([*types, *words])) or text
    return UsageError(f"{name} is {MASK if is_secret(name) else repr(value)}; allowed: {allowed}")
