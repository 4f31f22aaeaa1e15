"""Choose the model and data classes that a command line measures, before its parser is built.

The parser then has exactly the options of these two classes: its help lists them, and it refuses all others. Shipped
configurations are written for lmbench's own model. Their settings are ignored where another class is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule, LightningModule

from lmbench.configs import lines_of, parse_yaml, read_config, shipped_configs
from lmbench.data.datamodule import ShapeData, TokenData
from lmbench.errors import UsageError, import_named
from lmbench.fit.strategies import name_classes
from lmbench.model.attention_layer import AttentionLayer
from lmbench.model.hugging_face import HuggingFace
from lmbench.model.language_model import LanguageModel
from lmbench.records.vocabulary import Values

BASES: dict[str, type] = {"model": LightningModule, "data": LightningDataModule}
#: The classes that are measured when a command line names no class.
DEFAULTS: dict[str, type] = {"model": LanguageModel, "data": TokenData}
#: lmbench's model classes, each with the data class that it is measured on by default.
OWN_DATA: dict[type, type] = {LanguageModel: TokenData, AttentionLayer: ShapeData, HuggingFace: TokenData}
#: The loader method that each command calls on a module without a data module.
LOADERS = {"fit": "train_dataloader", "validate": "val_dataloader"}
#: The end of the error line for an object that is no LightningModule, after the object's name.
NO_MODULE = (
    "is no lightning.pytorch.LightningModule (or no instance of one); a torch.nn.Module has to be wrapped in one, a "
    "module of pytorch_lightning has to import lightning.pytorch instead"
)
#: The classes that shipped configurations are written for; subclasses take the settings too.
_SHIPPED_FOR = {"model": (LanguageModel,), "data": (TokenData, ShapeData)}
#: The class path that stands for "no class", as in `--data null`.
_NULL = "null"


class Subject(NamedTuple):
    """The class path and arguments that one configuration or option gives for the model or for the data."""

    class_path: str | None
    arguments: Values
    is_shipped: bool


@dataclass
class Chosen:
    """The classes and settings that a command line measures.

    Attributes:
        model: the class of the model.
        data: the class of the data; None to measure the model's own loaders.
        settings: the content of every configuration, in order; `model` and `data` hold arguments of the classes.
        words: the remaining words of the command line, without configurations and classes.
        places: file and line of each configured setting, such as `mine.yaml:3`, by its dotted name.
        ignored: one sentence for each group of settings that was ignored in a shipped configuration.
    """

    model: type
    data: type | None
    settings: list[Values]
    words: list[str]
    places: dict[str, str]
    ignored: list[str] = field(default_factory=list)

    def is_set(self, key: str, name: str) -> bool:
        """Whether a configuration or an option sets the argument `name` of the group `key`."""
        is_configured = any(name in content.get(key, ()) for content in self.settings)
        return is_configured or any(word.partition("=")[0] == f"--{key}.{name}" for word in self.words)


def choose(command: str, words: list[str]) -> Chosen:
    """Read the configurations that a command line names, and import its classes.

    A later configuration overrides an earlier one, and options override all configurations. A user's module gets data
    only when the command line asks for data, because the module may have its own loaders.

    Raises:
        UsageError: a configuration or class does not exist or cannot be read, or a module has neither loaders nor data.
    """
    subjects: dict[str, list[Subject]] = {"model": [], "data": []}
    settings, options, places = list[Values](), list[str](), dict[str, str]()
    # Configurations before `--model` and `--data`, which override them wherever they stand.
    for option, value in sorted(_pairs(words), key=lambda pair: pair[0] in ("--model", "--data")):
        if option == "--config":
            text, content = read_config(value)
            is_shipped = any(text == file.read_text() for file in shipped_configs().values())
            places |= lines_of(text, value)
            for key in BASES.keys() & content.keys():
                subjects[key].append(_subject(content.pop(key), is_shipped))
            settings.append(content)
        elif option:
            subjects[option.removeprefix("--")].append(_subject(parse_yaml(value, option), is_shipped=False))
        else:
            options.append(value)
    model_path = _class_path(subjects["model"])
    model = LanguageModel if model_path is None else import_class("model", model_path)
    wants_data = any(not subject.is_shipped for subject in subjects["data"])
    wants_data |= any(word.startswith("--data.") for word in options)
    strategies = [(content.get("trainer") or {}).get("strategy") for content in settings]
    configured = next((name for name in reversed(strategies) if isinstance(name, str)), None)
    options = list(name_classes(options, configured))
    choice = Chosen(model, _data_class(model, command, subjects["data"], wants_data), settings, options, places)
    settings += [{key: _arguments(choice, key, subject)} for key in BASES for subject in subjects[key]]
    return choice


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (option, value) for every configuration and class, and ("", word) for every other word.

    A first word without dashes names the configuration, as in `fit smoke`. A strategy or profiler is one word with its
    option. The profiler name `kernels` is replaced by its class, so that options of that class can follow.
    """
    remaining = iter(words)
    for index, word in enumerate(remaining):
        option, equals, value = word.partition("=")
        option = "--config" if option == "-c" else option
        if index == 0 and not word.startswith("-"):
            yield "--config", word
        elif option in ("--config", "--model", "--data", "--trainer.profiler", "--trainer.strategy"):
            value = value if equals else next(remaining, "")
            if not value:
                raise UsageError(f"{option} needs a value")
            if option == "--trainer.profiler" and value == "kernels":
                value = "lmbench.KernelProfiler"
            if option.startswith("--trainer."):
                option, value = "", f"{option}={value}"
            yield option, value
        else:
            yield "", word


def _subject(setting: Any, is_shipped: bool) -> Subject:
    if not isinstance(setting, Mapping):
        return Subject(_NULL if setting is None else str(setting), {}, is_shipped)
    arguments = {**setting, **(setting.get("init_args") or {})}
    arguments.pop("init_args", None)
    return Subject(arguments.pop("class_path", None), arguments, is_shipped)


def _class_path(subjects: list[Subject]) -> str | None:
    """The class path that is named last; None when no class is named."""
    return next((subject.class_path for subject in reversed(subjects) if subject.class_path), None)


def _data_class(model: type, command: str, subjects: list[Subject], wants_data: bool) -> type | None:
    """The class of the data; None to measure the model's own loaders.

    Raises:
        UsageError: the named class cannot be imported, or there are neither loaders nor data.
    """
    path = _class_path(subjects)
    default = next((data for own_model, data in OWN_DATA.items() if issubclass(model, own_model)), None)
    named = None if path in (None, _NULL) else import_class("data", str(path))
    # Attention by itself makes its own inputs, and ShapeData only gives their shape: no other data can be named.
    if default is ShapeData:
        return ShapeData
    if named is not None:
        return named
    has_loader = getattr(model, LOADERS[command]) is not getattr(LightningModule, LOADERS[command])
    if path is None and (default or wants_data or (subjects and not has_loader)):
        return default or TokenData
    if not has_loader:
        raise UsageError(
            f"{model.__name__} has no {LOADERS[command]}(); name its data with --data my_file.MyData, or take "
            "lmbench's tokens with --data.batch_size 4"
        )
    return None


def _arguments(choice: Chosen, key: str, subject: Subject) -> Values:
    """The subject's arguments for the chosen class, of another class those that the chosen one has too."""
    chosen: type | None = getattr(choice, key)
    if subject.class_path == _NULL or (chosen is None and not subject.is_shipped):
        return {}
    if subject.class_path and chosen and import_class(key, subject.class_path) is not chosen:
        names = ArgumentParser().add_class_arguments(chosen, fail_untyped=False, sub_configs=True)
        choice.ignored += [
            f"ignored {key}.{name} of {subject.class_path}: {chosen.__name__} has no such argument"
            for name in sorted(subject.arguments.keys() - names)
        ]
        return {name: value for name, value in subject.arguments.items() if name in names}
    if subject.is_shipped and subject.arguments and not (chosen and issubclass(chosen, _SHIPPED_FOR[key])):
        names = ", ".join(f"{key}.{name}" for name in sorted(subject.arguments))
        owner = (chosen or choice.model).__name__
        choice.ignored.append(
            f"ignored {names} of the shipped configuration: it is of lmbench's own {key}, not of {owner}"
        )
        return {}
    return subject.arguments


def import_class(key: str, path: str) -> type:
    """Import the class that `--model` or `--data` names.

    Raises:
        UsageError: the module or class does not exist, the module's own code fails, or the class has the wrong base.
    """
    option = f"--{key} {path}"
    imported = import_named(option, path)
    if not (isinstance(imported, type) and issubclass(imported, BASES[key])):
        raise UsageError(f"{option} {NO_MODULE if key == 'model' else 'is no lightning.pytorch.LightningDataModule'}")
    return imported
