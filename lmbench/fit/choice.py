"""Which model and data a command line measures, decided before its parser is built.

The parser then has the options of these two classes and of no other: its help lists them, and it refuses the rest. Of a
shipped configuration, which is of lmbench's own model, the settings that other classes cannot use are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

from lmbench.configs import parse_yaml, read_yaml, shipped_configs
from lmbench.data.datamodule import TokenData
from lmbench.data.shapes import ShapeData
from lmbench.errors import UsageError, suggest
from lmbench.imports import import_named
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
_NULL = "null"


@dataclass
class Choice:
    """What a command line measures.

    Attributes:
        model: the class of the model.
        data: the class of the data; None where the model has loaders of its own.
        settings: the content of all configurations; `model` and `data` hold the arguments of the two classes.
        words: the options beside configurations and classes.
        ignored: what was left out of shipped configurations and why, in sentences.
    """

    model: type
    data: type | None
    settings: dict[str, Any]
    words: list[str]
    ignored: list[str] = field(default_factory=list)


def path_of(named: type) -> str:
    """The dotted path of a class."""
    return f"{named.__module__}.{named.__qualname__}"


def choose(command: str, words: list[str]) -> Choice:
    """Read the configurations that a command line names, and find its classes.

    Configurations count in their order and before the words. A user's module gets no data unless some was asked for, as
    it may have loaders of its own.

    Raises:
        UsageError: a configuration or class that is not there, a module with neither loaders nor data, or data that it
            has no use for.
    """
    parts: dict[str, list[tuple[Any, bool]]] = {"model": [], "data": []}
    settings: dict[str, Any] = {}
    rest: list[str] = []
    named: dict[str, str] = {}
    for option, value in _pairs(words):
        if option in ("--model", "--data"):
            named[option[2:]] = value
        elif option == "--config":
            content, is_shipped = read_config(value)
            for key in BASES.keys() & content.keys():
                parts[key].append((content.pop(key), is_shipped))
            settings = _merged(settings, content)
        else:
            rest.append(value)
    for key, value in named.items():
        parts[key].append((_part(value), False))
    model_path = _class_path(parts["model"])
    if model_path == _NULL:
        raise UsageError("model is null; leave it out, or give its settings")
    model = LanguageModel if model_path is None else import_class("model", model_path)
    is_asked_for = any(not is_shipped for _, is_shipped in parts["data"])
    is_asked_for |= any(word.startswith("--data.") for word in rest)
    choice = Choice(model, _data_class(model, command, parts["data"], is_asked_for), settings, rest)
    for key in BASES:
        settings[key] = _arguments(choice, key, parts[key])
    return choice


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    """Configurations and classes as option and value; of everything else the word alone. A first word without an option
    names the configuration: `fit smoke`; the profiler `kernels` is a class, so that its options can follow it."""
    remaining = iter(words)
    for place, word in enumerate(remaining):
        option, equals, value = word.partition("=")
        if not place and not word.startswith("-"):
            yield "--config", word
        elif option in ("--config", "-c", "--model", "--data"):
            value = value if equals else next(remaining, "")
            if not value:
                raise UsageError(f"{option} needs a value")
            yield "--config" if option == "-c" else option, value
        elif option == "--trainer.profiler":
            value = value if equals else next(remaining, "")
            yield "", f"{option}={'lmbench.KernelProfiler' if value == 'kernels' else value}"
        else:
            yield "", word


def _data_class(model: type, command: str, parts: list[tuple[Any, bool]], is_asked_for: bool) -> type | None:
    """The class of the data; None where the model's own loaders are measured."""
    path = _class_path(parts)
    own = next((data for known, data in OWN_DATA.items() if issubclass(model, known)), None)
    named = None if path in (None, _NULL) else import_class("data", str(path))
    if issubclass(model, AttentionLayer) and (
        path == _NULL or not issubclass(named or TokenData, TokenData | ShapeData)
    ):
        raise UsageError(
            f"--data is {path}, and attention by itself holds its inputs; leave it out: their shape is "
            "--data.batch_size and --data.context_length"
        )
    if named is not None:
        return own if own is ShapeData and named is TokenData else named
    loader = LOADERS[command]
    has_loader = getattr(model, loader) is not getattr(LightningModule, loader)
    if path is None and (own is not None or is_asked_for or (parts and not has_loader)):
        return own or TokenData
    if not has_loader:
        again = "" if path else ", or lmbench's tokens with --data.batch_size 4"
        raise UsageError(f"{model.__name__} has no {loader}(); name its data with --data my_file.MyData{again}")
    return None


def read_config(name: str) -> tuple[dict[str, Any], bool]:
    """The content of a configuration, and whether it is a shipped one.

    A file of the user's own comes first; `configs/large_bf16.yaml` also finds the shipped one where there is no such
    file. A configuration may also be YAML or JSON text.

    Raises:
        UsageError: neither a file nor a shipped configuration, or its content is no mapping.
    """
    path, shipped = Path(name), shipped_configs()
    is_name = path.parent.name in ("", "configs") and not path.is_absolute() and path.suffix in ("", ".yaml")
    if path.exists():
        text, content = read_yaml(path, f"config {name!r}")
    elif ":" in name:
        text, content = name, parse_yaml(name, "--config")
    elif is_name and path.stem in shipped:
        text, content = read_yaml(shipped[path.stem], name)
    else:
        hint = suggest(path.stem, shipped) or f" ({', '.join(shipped)})"
        raise UsageError(f"config {name!r} is no file and no shipped configuration{hint}")
    if not isinstance(content, dict):
        raise UsageError(f"a configuration is YAML with a setting a line (`key: value`); given: {text.strip()[:80]!r}")
    return content, any(text == file.read_text() for file in shipped.values())


def _part(value: str) -> Any:
    """What `--model` or `--data` names: a class by its path, or in a file or text with its arguments."""
    if value.endswith((".yaml", ".yml")) and Path(value).is_file():
        return read_yaml(Path(value), f"file {value!r}")[1]
    return parse_yaml(value, "--model") if value.startswith("{") else {"class_path": value}


def _class_path(parts: list[tuple[Any, bool]]) -> str | None:
    """The class that is named last, `null` for none; None where no class is named."""
    path = None
    for part, _ in parts:
        named = {"class_path": part} if isinstance(part, str) else part or {"class_path": _NULL}
        path = named.get("class_path", path)
    return path


def _arguments(choice: Choice, key: str, parts: list[tuple[Any, bool]]) -> dict[str, Any]:
    """The arguments that configurations give the chosen class."""
    chosen: type | None = getattr(choice, key)
    arguments: dict[str, Any] = {}
    for part, is_shipped in parts:
        if not isinstance(part, Mapping) or part.get("class_path") == _NULL:
            continue
        if "class_path" in part and part.keys() - {"class_path", "init_args", "dict_kwargs"}:
            reason = "keep one (a class has its init_args)"
            raise UsageError(f"{key} is given both as a class and by arguments of lmbench's own; {reason}")
        is_class = bool({"class_path", "init_args"} & part.keys())
        own: dict[str, Any] = (part.get("init_args") or {}) if is_class else dict(part)
        if "class_path" in part and import_class(key, part["class_path"]) is not chosen:
            # Arguments of a class in whose place another one was named.
            continue
        is_foreign = is_shipped and not is_class and chosen not in (DEFAULTS[key], None)
        if is_shipped and chosen is None:
            _ignore(choice, key, own, f"{choice.model.__name__} brings its data")
        elif is_foreign and key == "model" and not issubclass(choice.model, LanguageModel):
            _ignore(choice, key, own, f"it belongs to lmbench's own model, not to {choice.model.__name__}")
        elif is_foreign and key == "data" and chosen is not None:
            known = class_options(chosen)
            _ignore(choice, key, own.keys() - known, f"{chosen.__name__} has no such option")
            arguments = _merged(arguments, {name: own[name] for name in own if name in known})
        elif chosen is not None:
            arguments = _merged(arguments, own)
    return arguments


def _ignore(choice: Choice, key: str, names: Any, reason: str) -> None:
    if names:
        settings = ", ".join(f"{key}.{name}" for name in sorted(names))
        choice.ignored.append(f"ignored {settings} of the shipped configuration: {reason}")


def _merged(first: Any, second: Any) -> dict[str, Any]:
    """Two configurations, of which the second one counts; another class takes its arguments from itself alone."""
    merged: dict[str, Any] = dict(first)
    for name, value in second.items():
        before: Any = merged.get(name)
        is_same = isinstance(value, dict) and isinstance(before, dict)
        is_same = is_same and value.get("class_path") in (None, before.get("class_path"))
        merged[name] = _merged(before, value) if is_same else value
    return merged


@cache
def class_options(used: type) -> frozenset[str]:
    """The names of a class's arguments, as the parser finds them."""
    added = ArgumentParser(exit_on_error=False).add_class_arguments(used, "of", fail_untyped=False)
    return frozenset(name.split(".")[1] for name in added)


def import_class(key: str, path: str) -> type:
    """Import the class that `--model` or `--data` names.

    Raises:
        UsageError: no such module or class, an error in the module's own code, or a class of another kind.
    """
    what, base = f"--{key} {path}", BASES[key]
    module_name, _, name = path.rpartition(".")
    if not module_name or name == "py":
        raise UsageError(f"{what}: name the class with its module, as in {_classes_in(path, base)}")
    module = import_named(what, module_name)
    named = getattr(module, name, None)
    if named is None:
        hint = suggest(name, dir(module), module_name + ".{}")
        raise UsageError(f"{what}: module {module_name} has no {name}{hint}")
    if not (isinstance(named, type) and issubclass(named, base)):
        raise UsageError(f"{what} is no lightning.pytorch.{base.__name__}{why_no_module(named)}")
    return named


def _classes_in(path: str, base: type) -> str:
    """The classes that the name of a file may have been meant for; an example where there are none."""
    module_name = path.removesuffix(".py").replace("/", ".")
    try:
        members = list(vars(import_named(module_name, module_name)).values())
    except UsageError:
        members = []
    classes = [each for each in members if isinstance(each, type) and issubclass(each, base)]
    names = [path_of(each) for each in classes if each.__module__ == module_name]
    return " or ".join(names[:3]) or f"my_file.{path or 'MyClass'}"


def why_no_module(named: object) -> str:
    """What to do with a class that is almost a LightningModule."""
    bases = getattr(named, "__mro__", ())
    if any(base.__module__.startswith("pytorch_lightning.") for base in bases):
        return " but pytorch_lightning's; let it import lightning.pytorch instead"
    if nn.Module in bases:
        return (
            " but a torch.nn.Module; wrap it in one: training_step returns the loss, configure_optimizers an optimizer"
        )
    return ""
