"""Which class is measured, and on which data: lmbench's own, or somebody's that was named."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule, LightningModule

from lmbench.data.datamodule import TokenData
from lmbench.errors import UsageError
from lmbench.fit.given import Given, what_is_given
from lmbench.model.language_model import LanguageModel

# The loader that each command needs of a module that has no data module.
LOADERS = {"fit": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader"}

# Settings that both sides have: the one that is set, and the one that follows.
FOLLOWING = (("data", "model", "context_length"), ("model", "data", "vocab_size"))


@dataclass(frozen=True)
class Part:
    """The model or the data of a run.

    `used` is its class, None for data that the module brings itself; `is_named` says that it was named, so that its
    arguments lie under `init_args`; `given` are the arguments that were set.
    """

    key: str
    used: type | None
    is_named: bool
    given: frozenset[str]

    @cached_property
    def arguments(self) -> frozenset[str]:
        """Names of the arguments of its class, found as the command line's parser finds them."""
        if self.used is None:
            return frozenset()
        added = ArgumentParser(exit_on_error=False).add_class_arguments(self.used, "part", fail_untyped=False)
        return frozenset(name.removeprefix("part.") for name in added)

    @property
    def is_own(self) -> bool:
        """Whether lmbench knows the model's every line, and may move what it does."""
        return self.used is not None and issubclass(self.used, LanguageModel)

    def path(self, name: str) -> str:
        return f"{self.key}.init_args.{name}" if self.is_named else f"{self.key}.{name}"

    def options(self) -> list[str]:
        """Its options, as they are typed."""
        return [f"{self.key}.{name}" for name in sorted(self.arguments)]


@dataclass(frozen=True)
class Choice:
    """Model and data of one run."""

    model: Part
    data: Part

    def links(self) -> list[tuple[str, str]]:
        """Settings that follow from one another: only where both sides have them, and, in a class that was named, only
        where its own was not set."""
        parts = {"model": self.model, "data": self.data}
        return [
            (parts[source].path(name), parts[target].path(name))
            for source, target, name in FOLLOWING
            if name in parts[source].arguments & parts[target].arguments
            and not (parts[target].is_named and name in parts[target].given)
        ]


def choose(args: list[str], environment: Mapping[str, str]) -> Choice:
    """The classes that the words (a command first), their configuration files and the environment name.

    Without a name they are lmbench's own; a module that was named and has its own loaders gets no data unless some
    was asked for. Where a class is named, modules of the current folder can be.

    Raises:
        UsageError: a class that cannot be imported or is of the wrong kind; a module with neither loaders nor data.
    """
    command = args[0]
    model, data = (what_is_given(key, args, environment) for key in ("model", "data"))
    if model.class_path or data.class_path:
        _make_current_folder_importable()
    model_part = _part("model", model, LanguageModel, LightningModule)
    if data.class_path is None and model.class_path is not None and (data.is_null or not data.names):
        _check_loader(model_part, command, data.is_null)
        return Choice(model_part, Part("data", None, False, frozenset()))
    return Choice(model_part, _part("data", data, TokenData, LightningDataModule))


def _part(key: str, given: Given, own: type, base: type) -> Part:
    used = own if given.class_path is None else import_class(key, given.class_path, base)
    return Part(key, used, given.class_path is not None, frozenset(given.names))


def _check_loader(model: Part, command: str, is_null: bool) -> None:
    loader = LOADERS.get(command, "")
    if getattr(model.used, loader, None) is getattr(LightningModule, loader, None):
        assert model.used is not None
        again = "" if is_null else ", or lmbench's tokens with --data.batch_size 4"
        raise UsageError(f"{model.used.__name__} has no {loader}(); name its data with --data my_file.MyData{again}")


def _make_current_folder_importable() -> None:
    # As `python -m` does; an installed command leaves it out.
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)


def import_class(key: str, path: str, base: type) -> type:
    """Import the class that `--model` or `--data` names.

    Raises:
        UsageError: no such module or class, an error in the module's own code, or a class that is no `base`.
    """
    what = f"--{key} {path}"
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise UsageError(f"{what}: name the class with its module, as in my_file.{path or 'MyClass'}")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what}: {_why_no_import(module_name, error)}") from error
    found = getattr(module, name, None)
    if found is None:
        near = get_close_matches(name, vars(module), 1)
        hint = f"; did you mean {module_name}.{near[0]}?" if near else ""
        raise UsageError(f"{what}: module {module_name} has no {name}{hint}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UsageError(f"{what} is no lightning.pytorch.{base.__name__}{_other_namespace(found)}")
    return found


def _why_no_import(module_name: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        if f"{module_name}.".startswith(f"{error.name}."):
            return f"there is no module {error.name}, neither in this folder nor installed"
        return f"{module_name} imports {error.name}, which is not installed"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else f"{frame.filename}:{frame.lineno}"
    return f"importing {module_name} failed at {place}: {type(error).__name__}: {' '.join(str(error).split())}"


def _other_namespace(found: object) -> str:
    bases = getattr(found, "__mro__", ())
    if any(base.__module__.startswith("pytorch_lightning.") for base in bases):
        return " but pytorch_lightning's; let it import lightning.pytorch instead"
    return ""
