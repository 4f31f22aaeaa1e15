"""Which model and data a command line measures, decided before its parser is built.

The parser then has the options of these two classes and of no other: its help lists them, and it refuses the rest. Of a
shipped configuration, which is of lmbench's own model, the settings that other classes cannot use are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule, LightningModule

from lmbench.configs import find_shipped, lines_of, parse_yaml, read_yaml, shipped_configs
from lmbench.data.datamodule import ShapeData, TokenData
from lmbench.errors import UsageError, import_named
from lmbench.model.attention_layer import AttentionLayer
from lmbench.model.hugging_face import HuggingFace
from lmbench.model.language_model import LanguageModel

BASES: dict[str, type] = {"model": LightningModule, "data": LightningDataModule}
#: The classes that are measured where none is named.
DEFAULTS: dict[str, type] = {"model": LanguageModel, "data": TokenData}
#: lmbench's models, and the data that each is measured on where none is named.
OWN_DATA: dict[type, type] = {LanguageModel: TokenData, AttentionLayer: ShapeData, HuggingFace: TokenData}
#: The loader that each command needs of a module that has no data module.
LOADERS = {"fit": "train_dataloader", "validate": "val_dataloader"}
#: Why a class that looks like a LightningModule is none.
NO_MODULE = (
    "is no lightning.pytorch.LightningModule (or no instance of one); a torch.nn.Module has to be wrapped in one, a "
    "module of pytorch_lightning has to import lightning.pytorch instead"
)
#: The classes that shipped configurations have settings of.
_SHIPPED_FOR: dict[str, tuple[type, ...]] = {"model": (LanguageModel,), "data": (TokenData, ShapeData)}
_NULL = "null"


class Subject(NamedTuple):
    """What one configuration or option says of the model or of the data; the class path `null` stands for none."""

    class_path: str | None
    arguments: dict[str, Any]
    is_shipped: bool


@dataclass
class Choice:
    """What a command line measures.

    Attributes:
        model: the class of the model.
        data: the class of the data; None where the model has loaders of its own.
        settings: the contents of all configurations in their order; `model` and `data` hold arguments of the classes.
        words: the options beside configurations and classes.
        places: where each setting of a configuration stands, `mine.yaml:3`, by its dotted name.
        ignored: what was left out of shipped configurations and why, in sentences.
    """

    model: type
    data: type | None
    settings: list[dict[str, Any]]
    words: list[str]
    places: dict[str, str]
    ignored: list[str] = field(default_factory=list)

    def is_set(self, key: str, name: str) -> bool:
        """Whether a configuration or an option sets the argument `name` of the group `key`."""
        is_in_file = any(name in content.get(key, ()) for content in self.settings)
        return is_in_file or any(word.partition("=")[0] == f"--{key}.{name}" for word in self.words)


def choose(command: str, words: list[str]) -> Choice:
    """Read the configurations that a command line names, and find its classes.

    Configurations count in their order and before the words. A user's module gets no data unless some was asked for, as
    it may have loaders of its own.

    Raises:
        UsageError: a configuration or class that is not there, a module with neither loaders nor data, or data that it
            has no use for.
    """
    subjects: dict[str, list[Subject]] = {"model": [], "data": []}
    settings, rest, places = list[dict[str, Any]](), list[str](), dict[str, str]()
    for option, value in sorted(_pairs(words), key=lambda pair: pair[0] in ("--model", "--data")):
        if option == "--config":
            # A file of the user's own comes first.
            complaint = f"config {value!r} is no file and no shipped configuration"
            text, content = read_yaml(find_shipped(value, shipped_configs(), "configs", complaint), f"config {value!r}")
            if not isinstance(content, dict):
                raise UsageError(
                    f"a configuration is YAML with a setting a line (`key: value`); given: {text.strip()[:80]!r}"
                )
            is_shipped = any(text == file.read_text() for file in shipped_configs().values())
            places |= lines_of(text, value)
            for key in BASES.keys() & content.keys():
                subjects[key].append(_subject(content.pop(key), is_shipped))
            settings.append(content)
        elif option:
            subjects[option.removeprefix("--")].append(_subject(parse_yaml(value, option), is_shipped=False))
        else:
            rest.append(value)
    model_path = _class_path(subjects["model"])
    model = LanguageModel if model_path is None else import_class("model", model_path)
    is_data_asked_for = any(not part.is_shipped for part in subjects["data"])
    is_data_asked_for |= any(word.startswith("--data.") for word in rest)
    choice = Choice(model, _data_class(model, command, subjects["data"], is_data_asked_for), settings, rest, places)
    settings += [{key: _arguments(choice, key, part)} for key in BASES for part in subjects[key]]
    return choice


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    """Configurations and classes as option and value; of everything else the word alone. A first word without an option
    names the configuration: `fit smoke`; the profiler `kernels` is a class, so that its options can follow it."""
    remaining = iter(words)
    for index, word in enumerate(remaining):
        option, equals, value = word.partition("=")
        option = "--config" if option == "-c" else option
        if index == 0 and not word.startswith("-"):
            yield "--config", word
        elif option in ("--config", "--model", "--data", "--trainer.profiler"):
            value = value if equals else next(remaining, "")
            if not value:
                raise UsageError(f"{option} needs a value")
            if option == "--trainer.profiler":
                profiler = "lmbench.KernelProfiler" if value == "kernels" else value
                option, value = "", f"{option}={profiler}"
            yield option, value
        else:
            yield "", word


def _subject(part: Any, is_shipped: bool) -> Subject:
    if not isinstance(part, Mapping):
        return Subject(_NULL if part is None else str(part), {}, is_shipped)
    arguments = {**part, **(part.get("init_args") or {})}
    arguments.pop("init_args", None)
    return Subject(arguments.pop("class_path", None), arguments, is_shipped)


def _class_path(parts: list[Subject]) -> str | None:
    """The class that is named last; None where no class is named."""
    return next((part.class_path for part in reversed(parts) if part.class_path), None)


def _data_class(model: type, command: str, parts: list[Subject], is_asked_for: bool) -> type | None:
    """The class of the data; None where the model's own loaders are measured."""
    path = _class_path(parts)
    own = next((data for known, data in OWN_DATA.items() if issubclass(model, known)), None)
    named = None if path in (None, _NULL) else import_class("data", str(path))
    if own is ShapeData or named is not None:
        # Attention by itself holds its inputs, whose shape the data tells.
        return own if own is ShapeData else named
    has_loader = getattr(model, LOADERS[command]) is not getattr(LightningModule, LOADERS[command])
    if path is None and (own or is_asked_for or (parts and not has_loader)):
        return own or TokenData
    if not has_loader:
        raise UsageError(
            f"{model.__name__} has no {LOADERS[command]}(); name its data with --data my_file.MyData, or take "
            "lmbench's tokens with --data.batch_size 4"
        )
    return None


def _arguments(choice: Choice, key: str, part: Subject) -> dict[str, Any]:
    """The arguments that a part gives the chosen class; none where they are another class's."""
    chosen: type | None = getattr(choice, key)
    if part.class_path and (part.class_path == _NULL or import_class(key, part.class_path) is not chosen):
        return {}
    if part.is_shipped and not (chosen and issubclass(chosen, _SHIPPED_FOR[key])):
        names = ", ".join(f"{key}.{name}" for name in sorted(part.arguments))
        owner = (chosen or choice.model).__name__
        choice.ignored.append(
            f"ignored {names} of the shipped configuration: it is of lmbench's own {key}, not of {owner}"
        )
        return {}
    return part.arguments


def import_class(key: str, path: str) -> type:
    """Import the class that `--model` or `--data` names.

    Raises:
        UsageError: no such module or class, an error in the module's own code, or a class of another kind.
    """
    what = f"--{key} {path}"
    named: Any = import_named(what, path)
    if not (isinstance(named, type) and issubclass(named, BASES[key])):
        raise UsageError(f"{what} {NO_MODULE if key == 'model' else 'is no lightning.pytorch.LightningDataModule'}")
    return named
