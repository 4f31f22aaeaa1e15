"""A command line of `lmbench fit` or `validate`, understood: settings to write down, and objects built of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from copy import deepcopy
from enum import Enum
from functools import cache
from pickle import UnpicklingError
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_dumper

from lmbench.callbacks import PhaseTimer
from lmbench.errors import UsageError, suggest
from lmbench.fit.choice import DEFAULTS, choose, path_of
from lmbench.fit.modes import usual_mode
from lmbench.fit.settings import DtypeSettings, MeasureSettings, MemorySettings, refuse
from lmbench.fit.trainer import TRAINER_DEFAULTS, BenchTrainer
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

# libyaml, where it is there, takes a fifth of the time.
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_SafeDumper):  # type: ignore[misc]
    """Writes a member of an enumeration, where that is the default of something typed as text, as its value:
    Lightning's Timer has one."""


_Dumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))


def _as_yaml(content: Any) -> str:
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False)
    return text


set_dumper("yaml", _as_yaml)


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
    return parser


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
        words = [re.sub(r"^--(model|data)\.init_args\.", r"--\1.", word) for word in words]
        self.command, self.words = command, words
        choice = choose(command, words)
        self.model, self.data, self.ignored = choice.model, choice.data, choice.ignored
        self._parser = _parser(command, choice.model, choice.data)
        settings = {name: value for name, value in choice.settings.items() if value or name not in ("model", "data")}
        for name, value in settings.items():
            if value is None and (name == "trainer" or name in _GROUPS):
                raise UsageError(f"{name} is null; leave it out, or give its settings")
        texts = [f"--config={json.dumps(settings, default=str)}"] if settings else []
        try:
            self.config = self._parser.parse_args([*texts, *choice.words])
            refuse(self.config)
            self._continue_from_checkpoint()
        except ArgumentError as error:
            options = [name[2:] for name in self._parser._option_string_actions if name.startswith("--")]
            raise UsageError(translate(str(error), options)) from error
        self.config.pop("config", None)
        self._followed = self._follow(choice.settings)
        asked = [word for word in words if word.partition("=")[0] == "--measure.mode"]
        if command != "fit" and asked and self.config.measure.mode != "inference":
            # In a file it is that of its training, which may be measured as well.
            raise UsageError(
                f"measure.mode is {self.config.measure.mode}, and {command} measures inference; use `lmbench fit`"
            )

    def _continue_from_checkpoint(self) -> None:
        """Take the model's arguments from a checkpoint that has them."""
        path = self.config.get("ckpt_path")
        if not path or "://" in path:
            return
        try:
            arguments = torch.load(path, weights_only=True, map_location="cpu").get("hyper_parameters", {})
        except (UnpicklingError, EOFError, RuntimeError) as error:
            # PyTorch goes on with advice for programmers after its first sentence.
            reason = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
            raise UsageError(f"ckpt_path {path!r} cannot be read: {reason}") from error
        arguments = {name: value for name, value in arguments.items() if name not in ("_instantiator", "_class_path")}
        if arguments:
            self.config = self._parser.parse_object({"model": arguments}, self.config)

    def _follow(self, settings: dict[str, Any]) -> list[tuple[str, str]]:
        """Let settings follow from those of the other side; returns which did, as `("data", "vocab_size")`."""
        model, data = (self.config.get(key) or {} for key in ("model", "data"))
        sides = {"model": model, "data": data}
        followed = []

        def is_set(key: str, name: str) -> bool:
            option = f"--{key}.{name}"
            return name in settings[key] or any(word.partition("=")[0] == option for word in self.words)

        if self.data is DEFAULTS["data"] and callable(tell := getattr(self.model, "data_settings", None)):
            for name, value in tell(**vars(model)).items():
                if not is_set("data", name):
                    data[name] = value
                    followed.append(("data", name))
        for source, target, name in FOLLOWING:
            if name not in sides[source] or name not in sides[target]:
                continue
            is_own = path_of(getattr(self, target)).startswith("lmbench.")
            if not is_set(target, name):
                sides[target][name] = sides[source][name]
                followed.append((target, name))
            elif is_own:
                value = sides[target][name]
                raise UsageError(f"{target}.{name} follows {source}.{name}; set that: --{source}.{name} {value}")
        return followed

    def write(self) -> None:
        """Write the settings down as `content` and `text`.

        Raises:
            UsageError: a secret that no result keeps has to be filled in.
        """
        dumped = self._parser.dump(self.config, skip_none=False, format="yaml")
        content = yaml.load(dumped, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        content.setdefault("data", None)
        repeating = deepcopy(content)
        for key, name in self._followed:
            del repeating[key][name]
        self.text = _as_yaml(masked(self._with_classes(repeating)))
        self.content = self._with_classes(content)
        keep_secret(value for _, value in secrets_of(self.content))
        if missing := to_fill_in(self.content):
            raise UsageError(
                f"{' and '.join(missing)}: {MASK} stands for a secret, which no result keeps; give its value, "
                f"such as --{missing[0]} VALUE"
            )

    def _with_classes(self, content: dict[str, Any]) -> dict[str, Any]:
        """lmbench's own model and data are written without their classes, `model: {size: small}`."""
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
        values = self.config.get(key, Namespace()).clone()  # type: ignore[no-untyped-call]
        for name, value in changes.items():
            values[name] = value
        try:
            return _builder(key, used).instantiate_classes({key: values})[key]
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
        options = [name[2:] for name in builder._option_string_actions]
        raise UsageError(translate(str(error), options)) from error


_GROUP = re.compile(r"Group '([\w.]+)' does not accept option '([\w.]+)'")
_UNKNOWN = re.compile(r"(?:unrecognized arguments: --|Option ')([\w.+]+)")
_EXTRA = re.compile(r"unrecognized arguments: ([^-\s]\S*)")
_KEY = re.compile(r'Parser key "([^"]+)":(?:\s*Parser key "([^"]+)":)?')
_VALUE = re.compile(r"(?:Given value|Got value): (.*)")
_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "list": "a list"}


def translate(text: str, options: Iterable[str]) -> str:
    """One line for a complaint of jsonargparse; `options` are the names that a misspelt one may have been meant for."""
    group, unknown, extra = (pattern.search(text) for pattern in (_GROUP, _UNKNOWN, _EXTRA))
    if group or unknown:
        name = ".".join(group.groups()) if group else unknown[1]  # type: ignore[index]
        return f"unknown option --{name}{suggest(name, options, '--{}')} (`lmbench fit --help` lists them all)"
    if extra:
        return f"{extra[1]!r} is one word too many; a configuration comes first, options are --name value"
    key, value = _KEY.search(text), _VALUE.search(text)
    if key is None or value is None:
        return " ".join(text.split())
    name = key[2] or key[1]
    words = [word for literal in re.findall(r"Literal\[(.*?)\]", text) for word in re.findall(r"[\w.-]+", literal)]
    types = [_TYPES.get(kind, kind) for kind in re.findall(r"Expected an? <class '(\w+)'>", text) if kind != "NoneType"]
    if nested := re.search(r"NestedArg\(key='(\w+)'", value[1]):
        return f"--{name}.{nested[1]} is an option of a class; name the class before it, as in --{name} CLASS"
    allowed = ", ".join(dict.fromkeys(words or types)) or " ".join(text.split())
    return f"{name} is {MASK if is_secret(name) else repr(value[1].strip())}; allowed: {allowed}"
