"""The commands: functions of a few modules, each module imported when one of its commands runs."""

from importlib import import_module
from types import ModuleType
from typing import Any

MEASURING = ("fit", "validate")

#: Each command's module and summary. The module has a typed function of the command's name, or
#: `run(args: list[str]) -> int`.
COMMANDS = {
    "fit": ("fit", "measure training: forward, backward and optimizer times, memory, MFU"),
    "validate": ("fit", "measure inference on the validation data"),
    "list": ("list", "what has been measured, the newest first; names for results"),
    "show": ("list", "print a result again; alone, the newest"),
    "fields": ("fields", "what a number of a result means, and its unit"),
    "sweep": ("sweep", "measure a grid of configurations, each in a process of its own"),
    "report": ("report", "results as tables to paste, as CSV, or as one page with charts"),
    "upload": ("wandb", "bring results to W&B, each exactly once"),
    "board": ("wandb", "boards at W&B for each study, made or brought up to date"),
    "compare": ("compare", "is B slower than A? ratio with interval, and a verdict for CI"),
    "bisect": ("bisect", "which commit, version or option made it slower, found and proved"),
    "judge": ("judge", "is a change faster, trains it the same, is it to be believed? for agents and CI"),
    "tune": ("tune", "the fastest configuration that still trains the same, found and proved"),
    "noise": ("compare", "how far a configuration is from itself: the floor that compare relies on"),
    "kernels": ("rooms", "where the time went: kernels by phase, kind and part of the model"),
    "memory": ("rooms", "where the memory goes: a recorded peak explained, or one to come predicted"),
    "dtypes": ("rooms", "which dtype every tensor of a step had, and the reason for each cast"),
    "nsys": ("rooms", "run a fit under Nsight Systems, limited to the profiled steps"),
    "ceiling": ("rooms", "what matrix products and copies attain on this device, for kernels"),
    "numerics": ("rooms", "how wrong a sum in 16 bit is"),
    "overhead": ("rooms", "compare a bare loop, a plain Trainer and the harness"),
    "guide": ("guide", "how to do each of these things, page by page"),
    "completion": ("completion", "the script for bash or zsh that completes all this with the Tab key"),
    "selfcheck": ("rooms", "show that the numbers are true on this machine"),
}


def module_of(command: str) -> ModuleType:
    return import_module(f"{__name__}.{COMMANDS[command][0]}")


def function_of(command: str) -> Any:
    """The typed function of a command; None for `fit` and `validate`, which have a parser of their own."""
    # A function called `list` would hide Python's own.
    return getattr(module_of(command), "list_" if command == "list" else command, None)
