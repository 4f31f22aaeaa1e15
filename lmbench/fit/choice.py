"""Which class is measured, on which data: lmbench's own unless others are named.

Both are subclasses to the parser, of Lightning's base classes and with lmbench's own as the default. So one parser
reads `--model.size small` and `--model my_file.MyModule --model.width 4`, and both forms in a file. Parsed without
defaults, a command line tells what was set; the rest is decided here.
"""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn

from lmbench.data.datamodule import TokenData
from lmbench.data.shapes import ShapeData
from lmbench.errors import UsageError, suggest
from lmbench.fit.modes import usual_mode
from lmbench.imports import import_named
from lmbench.model.attention_layer import AttentionLayer
from lmbench.model.hugging_face import HuggingFace
from lmbench.model.language_model import LanguageModel

BASES: dict[str, type] = {"model": LightningModule, "data": LightningDataModule}
#: What is taken where nothing is named.
OWN: dict[str, type] = {"model": LanguageModel, "data": TokenData}
#: lmbench's models, of which every line is known, and the data that each is measured on where none is named.
OWN_DATA: dict[type, type] = {LanguageModel: TokenData, AttentionLayer: ShapeData, HuggingFace: TokenData}


def _path(named: type) -> str:
    return f"{named.__module__}.{named.__qualname__}"


OWN_PATHS = {key: _path(own) for key, own in OWN.items()}
_OWN_DATA_PATHS = {_path(own) for own in OWN_DATA.values()}

# The loader that each command needs of a module that has no data module.
LOADERS = {"fit": "train_dataloader", "validate": "val_dataloader"}

# Settings that both sides have: the one that is set, and the one that follows.
FOLLOWING = (
    ("data", "model", "context_length"),
    ("data", "model", "batch_size"),
    ("model", "data", "vocab_size"),
)


class ChoiceParser(LightningArgumentParser):
    """A command's parser. Its help tells the options of model and data as if they were its own."""

    _told: Mapping[str, type] = OWN

    def add_choices(self) -> None:
        """Add `--model` and `--data`."""
        for key, base in BASES.items():
            self.add_lightning_class_args(base, key, subclass_mode=True, required=False)

    def tell_of(self, named: Mapping[str, type | None]) -> None:
        """Let the help tell the options of other classes than lmbench's own, where they are named."""
        model = named["model"] or OWN["model"]
        self._told = {"model": model, "data": named["data"] or OWN_DATA.get(model, OWN["data"])}

    def format_help(self, *args: Any) -> str:
        text: str = super().format_help(*args)
        if "model" in self.get_defaults():
            parser = ArgumentParser(add_help=False, usage=SUPPRESS)
            for key, told in self._told.items():
                skip = {name for _, target, name in FOLLOWING if target == key}
                parser.add_class_arguments(told, key, skip=skip, fail_untyped=False)
            text += "\n" + parser.format_help()
        return text


def choose_own(parser: ArgumentParser) -> None:
    """Have lmbench's own model and data by default, which `settle` changes for one command line."""
    parser.set_defaults({key: {"class_path": path} for key, path in OWN_PATHS.items()})


def settle(parser: ArgumentParser, given: Namespace, loader: str) -> tuple[Namespace, list[tuple[str, str]]]:
    """All settings, from those that were set; and those that follow from others, as `("data", "vocab_size")`.

    A user's module gets no data unless some was asked for, as it may have loaders of its own: then it needs `loader`.
    Attention by itself has no optimizer, and is measured without one unless a mode is set.

    Raises:
        UsageError: a module with neither loaders nor data, or with data that it has no use for; a setting that follows
            from another was set.
    """
    model = model_class(given)
    if issubclass(model, AttentionLayer):
        _refuse_other_data(given)
    own_data = next((data for own, data in OWN_DATA.items() if issubclass(model, own)), None)
    if given.get("data") is None and ("data" in given or own_data is None):
        _check_loader(model, loader, is_null="data" in given)
        given.data = None
    elif own_data is not None and _class_path(given, "data") in (None, OWN_PATHS["data"]):
        # The parser took what was said of the data for that of the default model.
        given["data.class_path"] = _path(own_data)
    # A group that is null is refused later.
    if given.get("measure.mode") is None and ("measure" not in given or given.measure is not None):
        given["measure.mode"] = usual_mode(model)
    # The parser would hand what a default's and a named class's arguments have in common from one to the other.
    parser.set_defaults({key: None for key, path in OWN_PATHS.items() if _class_path(given, key) not in (None, path)})
    settings = parser.parse_object(given.clone())
    followed = _tell_data(model, settings, given)
    for source, target, name in FOLLOWING:
        values, there = (_arguments(settings, key) for key in (source, target))
        if name not in values or name not in there:
            continue
        if name not in _arguments(given, target):
            there[name] = values[name]
            followed.append((target, name))
        elif model in OWN_DATA if target == "model" else _class_path(settings, target) in _OWN_DATA_PATHS:
            raise UsageError(f"{target}.{name} follows {source}.{name}; set that: --{source}.{name} {there[name]}")
    return settings, followed


def _tell_data(model: type, settings: Namespace, given: Namespace) -> list[tuple[str, str]]:
    """Let a model say what lmbench's tokens are for it, where that is not set."""
    tell = getattr(model, "data_settings", None)
    if not callable(tell) or _class_path(settings, "data") != OWN_PATHS["data"]:
        return []
    data, set_already = _arguments(settings, "data"), _arguments(given, "data")
    told = {name: value for name, value in tell(**_arguments(settings, "model")).items() if name not in set_already}
    for name, value in told.items():
        data[name] = value
    return [("data", name) for name in told]


def model_class(settings: Namespace) -> type:
    """The class of the model in a command's settings."""
    named = _class_path(settings, "model")
    return LanguageModel if named is None else import_class("model", named)


def without_own_classes(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a command as they are written: lmbench's own model and data without the names of their classes,
    `model: {size: small}`."""
    plain = {}
    for key, value in settings.items():
        is_own = key in OWN and value is not None and value["class_path"] == OWN_PATHS[key]
        plain[key] = value["init_args"] if is_own else value
    return plain


@cache
def class_options(key: str, used: type) -> tuple[str, ...]:
    """The options of a class as they are typed, `model.width`, found as the parser finds them."""
    added = ArgumentParser(exit_on_error=False).add_class_arguments(used, key, fail_untyped=False)
    return tuple(sorted(added))


def untaken(key: str, path: str, name: str, taken: Sequence[str]) -> str:
    """What is said of an option that the class at a path does not take, of those that it takes."""
    names = [option.removeprefix(f"{key}.") for option in taken]
    following = {follower for _, target, follower in FOLLOWING if target == key}
    told = [f"--{key}.{each}" for each in names if each not in following and "." not in each]
    hint = suggest(name, names, f"--{key}.{{}}") or f"; it takes {', '.join(told) or 'no options'}"
    return f"{path} takes no {name}{hint}"


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
    found = getattr(module, name, None)
    if found is None:
        hint = suggest(name, dir(module), module_name + ".{}")
        raise UsageError(f"{what}: module {module_name} has no {name}{hint}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UsageError(f"{what} is no lightning.pytorch.{base.__name__}{_why_not(found)}")
    return found


def _classes_in(path: str, base: type) -> str:
    """The classes that the name of a file or module may have been meant for; an example where there are none."""
    module_name = path.removesuffix(".py").replace("/", ".")
    try:
        found = vars(import_named(module_name, module_name))
    except UsageError:
        found = {}
    kinds = {name: each for name, each in found.items() if isinstance(each, type) and issubclass(each, base)}
    names = [f"{module_name}.{name}" for name, each in kinds.items() if each.__module__ == module_name]
    return " or ".join(names[:3]) or f"my_file.{path or 'MyClass'}"


def _class_path(settings: Namespace, key: str) -> str | None:
    return (settings.get(key) or {}).get("class_path")


def _arguments(settings: Namespace, key: str) -> Any:
    """What is set in the model or the data; nothing where it is null."""
    return (settings.get(key) or {}).get("init_args") or {}


def _refuse_other_data(given: Namespace) -> None:
    """Attention by itself holds its inputs, and is told their shape."""
    named = _class_path(given, "data")
    is_null = "data" in given and given.data is None
    if is_null or (named not in (None, OWN_PATHS["data"]) and not issubclass(import_class("data", named), ShapeData)):
        raise UsageError(
            f"--data is {'null' if is_null else named}, and attention by itself holds its inputs; leave it out: their "
            "shape is --data.batch_size and --data.context_length"
        )


def _check_loader(model: type, loader: str, is_null: bool) -> None:
    if getattr(model, loader) is getattr(LightningModule, loader):
        again = "" if is_null else ", or lmbench's tokens with --data.batch_size 4"
        raise UsageError(f"{model.__name__} has no {loader}(); name its data with --data my_file.MyData{again}")


def _why_not(found: object) -> str:
    bases = getattr(found, "__mro__", ())
    if any(base.__module__.startswith("pytorch_lightning.") for base in bases):
        return " but pytorch_lightning's; let it import lightning.pytorch instead"
    if nn.Module in bases:
        return (
            " but a torch.nn.Module; wrap it in one: training_step returns the loss, configure_optimizers an optimizer"
        )
    return ""
