"""The commands: functions of a few modules, each module imported when one of its commands runs."""

from importlib import import_module
from importlib.resources import files
from types import ModuleType
from typing import Any

MEASURING = ("fit", "validate")

_LINES = (files(__name__) / "commands.txt").read_text("utf-8").splitlines()
#: Each command's module and summary, from commands.txt. The module has a typed function of the command's name, or
#: `run(args: list[str]) -> int`.
COMMANDS = {name: words for name, *words in (line.split(maxsplit=2) for line in _LINES)}


def module_of(command: str) -> ModuleType:
    return import_module(f"{__name__}.{COMMANDS[command][0]}")


def function_of(command: str) -> Any:
    """The typed function of a command; None for `fit` and `validate`, which have a parser of their own."""
    # A function called `list` would hide Python's own.
    return getattr(module_of(command), "list_" if command == "list" else command, None)
