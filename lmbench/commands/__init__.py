"""The commands: functions of a few modules, each module imported when one of its commands runs."""

from importlib import import_module
from types import ModuleType
from typing import Any

MEASURING = ("fit", "validate")

#: The summary of each command. Its module has a typed function of the command's name, and may have `more_help() -> str`
#: for the end of its help; or it has `run(args: list[str]) -> int`.
COMMANDS = {
    "fit": "measure training: times of forward, backward, optimizer; memory",
    "validate": "measure inference on the validation data",
    "list": "what has been measured, the newest first; names for results",
    "show": "print a result again; alone, the newest",
    "fields": "what a number of a result means, and its unit",
    "sweep": "measure a grid of configurations, each in a process of its own",
    "report": "results as tables to paste, as CSV, or as one page with charts",
    "upload": "bring results to W&B, each exactly once",
    "board": "boards at W&B for each study, made or brought up to date",
    "compare": "is B slower than A? ratio with interval, and a verdict for CI",
    "bisect": "which commit, version or option made it slower, found and proved",
    "judge": "is a change faster, and trains it the same? for agents and CI",
    "tune": "the fastest configuration that still trains the same, and proof",
    "noise": "how far a configuration is from itself: compare's noise floor",
    "kernels": "where the time went: kernels by phase, kind and part of the model",
    "memory": "where the memory goes: a recorded peak, or a predicted one",
    "dtypes": "which dtype each tensor of a step had, and why it was cast",
    "nsys": "run a fit under Nsight Systems, limited to the profiled steps",
    "ceiling": "what matrix products and copies attain on this device, for kernels",
    "numerics": "how wrong a sum in 16 bit is",
    "overhead": "compare a bare loop, a plain Trainer and the harness",
    "guide": "how to do each of these things, page by page",
    "completion": "the script with which bash or zsh completes all this",
    "selfcheck": "show that the numbers are true on this machine",
}
#: The modules of commands that have none of their own name.
_MODULES = {
    "validate": "fit", "show": "list", "upload": "wandb", "board": "wandb", "noise": "compare",
    **dict.fromkeys(("kernels", "memory", "dtypes", "nsys", "ceiling", "numerics", "overhead", "selfcheck"), "rooms"),
}  # fmt: skip


def module_of(command: str) -> ModuleType:
    return import_module(f"{__name__}.{_MODULES.get(command, command)}")


def function_of(command: str) -> Any:
    """The typed function of a command; None for `fit` and `validate`, which have a parser of their own."""
    # A function called `list` would hide Python's own.
    return getattr(module_of(command), "list_" if command == "list" else command, None)
