"""Errors that a user can cause, the checks that raise them, and the exit codes of all commands."""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from typing import Any

from lmbench.code_owners import code_owner
from lmbench.masking import masked_message, one_line

#: Largest number of names that end in a misspelt name and are suggested.
_MAX_SUGGESTIONS = 2


class ExitCode(IntEnum):
    """Exit codes of all commands; `lmbench guide measuring` explains them."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    OUT_OF_MEMORY = 3
    GUARD_FAILED = 4
    USER_CODE = 5
    NOT_SENT = 6
    SLOWER = 10
    UNDECIDED = 11
    INVALID = 12
    INTERRUPTED = 130
    TERMINATED = 143


class UsageError(Exception):
    """A user's mistake: one line that says what was given, what is allowed and what to do.

    It may be raised anywhere. The command line prints the line to standard error without a traceback, and exits with 2.
    The line may quote a file, a server or a secret; so secrets are masked and unprintable characters escaped here.
    """

    def __init__(self, line: str) -> None:
        super().__init__(one_line(masked_message(line)))

    def _render_traceback_(self) -> list[str]:
        """Let IPython show only the line in a notebook, without a traceback."""
        return [f"{type(self).__name__}: {self}"]


class Failure(Exception):
    """A command failed although its input was right: the reason in one line, and the exit code."""

    def __init__(self, reason: str, exit_code: ExitCode = ExitCode.INTERNAL) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


def tell(line: str) -> None:
    """Print a line to standard error, with secrets masked and unprintable characters escaped."""
    print(f"lmbench: {one_line(masked_message(line))}", file=sys.stderr, flush=True)


def message_of(error: BaseException) -> str:
    """An exception's message, also where its own `__str__` raises."""
    try:
        return str(error)
    except (Exception, SystemExit) as second:
        return f"its message cannot be read: {type(second).__name__} in __str__"


def error_line(error: BaseException) -> str:
    """An exception in one line: its class and its message, or the message alone where lmbench wrote it."""
    line = one_line(message_of(error))
    return line if isinstance(error, UsageError | Failure) else f"{type(error).__name__}: {line}"


def suggest(name: str, known: Iterable[str], form: str = "{}") -> str:
    """`; did you mean sdpa?`, to follow a line about a misspelt name; empty where no known name is similar.

    Known names that end in the misspelt one come first (`measure.steps` for `steps`), then a similar name.

    Args:
        name: the misspelt name.
        known: all names that would be right.
        form: format of a suggested name, such as `--{}`.
    """
    candidates = sorted(known)
    matches = [candidate for candidate in candidates if candidate.lower().rpartition(".")[2] == name.lower()]
    matches = matches[:_MAX_SUGGESTIONS] or get_close_matches(name, candidates, 1)
    return f"; did you mean {' or '.join(map(form.format, matches))}?" if matches else ""


def unknown(what: str, name: str, known: Iterable[str], otherwise: str = "") -> UsageError:
    """The error for an unknown name: `unknown attention 'spda'; choose one of ...; did you mean ...`.

    `otherwise` is text that follows the known names, such as `, or a function of your own`.
    """
    known = list(known)
    return UsageError(f"unknown {what} {name!r}; choose one of {', '.join(known)}{otherwise}{suggest(name, known)}")


def check_known(what: str, name: str, known: Iterable[str]) -> None:
    """Raises the error of `unknown` for a name that is not known."""
    if name not in known:
        raise unknown(what, name, known)


def check_at_least(limit: int, group: str, /, **values: float) -> None:
    """Raises UsageError for the first value of a group of settings that is below the limit, or nan."""
    for name, value in values.items():
        if not value >= limit:
            raise UsageError(f"{group}.{name} is {value}; it must be at least {limit}")


def check_one_line(what: str, text: str) -> None:
    """Raises UsageError for a text with a line feed or another unprintable character, which a script would obey."""
    if not text.isprintable():
        raise UsageError(f"{what} is {text!r}; it reaches a script, and may only have printable characters")


def check_divides(devices: int, **values: int) -> None:
    """Raises UsageError for the first value that `devices` does not divide; each is passed by its name."""
    for name, value in values.items():
        if value % devices:
            raise UsageError(f"{name} is {value}, which {devices} devices cannot share; split over fewer")


def find_modules_in_current_folder() -> None:
    """Let a user's module be imported from the working directory.

    `python -m lmbench` has that folder on its path; the installed command does not.
    """
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)


def import_named(what: str, path: str) -> Any:
    """Import an object of a user's module.

    Args:
        what: the option or setting that names the object, for messages.
        path: the object with its module, `my_module.MyClass` or `my_module:my_function`.

    Raises:
        UsageError: the module or the name in it does not exist, or importing the module failed.
    """
    module_name, separator, name = path.rpartition(":" if ":" in path else ".")
    if not module_name or name == "py":
        raise UsageError(f"{what}: name it with its module, as in my_file.MyClass")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((frame for frame in reversed(frames) if code_owner(frame.filename) == "user"), frames[-1])
        location = f"{frame.filename}:{frame.lineno}"
        if isinstance(error, SyntaxError):
            location = f"{error.filename}:{error.lineno}"
        reason = f"importing {module_name} failed at {location}: {error_line(error)}"
        if isinstance(error, ModuleNotFoundError) and error.name:
            reason = f"{module_name} imports {error.name}, which is not installed"
            if f"{module_name}.".startswith(f"{error.name}."):
                reason = f"there is no module {error.name}, neither in this folder nor installed"
        raise UsageError(f"{what}: {reason}") from error
    try:
        return attrgetter(name)(module)
    except AttributeError:
        hint = suggest(name, dir(module), f"{module_name}{separator}{{}}")
        raise UsageError(f"{what}: module {module_name} has no {name}{hint}") from None


#: Environment variables in which launchers set the number of processes, and the index of this process.
_COUNT = re.compile(
    "(LOCAL_)?WORLD_SIZE|SLURM_(NTASKS|NPROCS|NTASKS_PER_NODE)|FLUX_JOB_SIZE|PMI_SIZE"
    "|(OMPI_COMM_WORLD|MV2_COMM_WORLD|JSM_NAMESPACE)_SIZE"
)
_INDEX = re.compile(
    "((LOCAL|NODE|GROUP)_)?RANK|SLURM_(PROCID|LOCALID)|FLUX_TASK_RANK|PMI_RANK"
    "|(OMPI_COMM_WORLD|MV2_COMM_WORLD|JSM_NAMESPACE)_RANK"
)


def check_launcher(world_size: int = 1) -> None:
    """Raises UsageError where a launcher's variable tells of more processes than `world_size`, or is not a number."""
    for name, value in os.environ.items():
        is_count = _COUNT.fullmatch(name)
        if is_count or _INDEX.fullmatch(name):
            if not value.isdecimal():
                raise UsageError(f"{name} is {value!r}; a launcher of processes sets a whole number there; unset it")
            if int(value) > (world_size if is_count else world_size - 1):
                raise UsageError(
                    f"{name} is {value}: this is one process of several, and {world_size} is to be measured; ask for "
                    f"all with --trainer.devices and --trainer.num_nodes, start one alone, or unset {name}"
                )
