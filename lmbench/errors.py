"""Errors a user can cause, the checks that raise them, and the exit codes of every command."""

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

from lmbench.masking import masked_message, one_line

#: More suggestions than this are none.
_MOST_MEANT = 2


class ExitCode(IntEnum):
    """Exit codes, the same for every command (the README lists them)."""

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
    """A mistake in what the user gave: one line saying what was given, what is allowed, what to do.

    Raised anywhere; the command line prints the line to standard error and exits with 2, without a traceback. What it
    quotes may come from a file or a server, or be a secret: the message is made fit to be shown here, once.
    """

    def __init__(self, line: str) -> None:
        super().__init__(one_line(masked_message(line)))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a notebook: the line, as it says it all."""
        return [f"{type(self).__name__}: {self}"]


class Failure(Exception):
    """What keeps a command from its end though it was given nothing wrong: a reason in one line, and the exit code."""

    def __init__(self, reason: str, exit_code: ExitCode = ExitCode.INTERNAL) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


def tell(line: str) -> None:
    """Tell a line on standard error, whatever it quotes."""
    print(f"lmbench: {one_line(masked_message(line))}", file=sys.stderr, flush=True)


def suggest(name: str, known: Iterable[str], form: str = "{}") -> str:
    """`; did you mean sdpa?`, to follow a line about a misspelt name; nothing where none of the known is near.

    A known name that ends in the misspelt one is meant first (`steps`: `measure.steps`), then a similar name. `form` is
    how the known name is shown, such as `--{}`.
    """
    candidates = sorted(known)
    near = [known_name for known_name in candidates if known_name.lower().rpartition(".")[2] == name.lower()]
    near = near[:_MOST_MEANT] or get_close_matches(name, candidates, 1)
    return f"; did you mean {' or '.join(map(form.format, near))}?" if near else ""


def unknown(what: str, name: str, known: Iterable[str], otherwise: str = "") -> UsageError:
    """The error for a name that is none of the known: `unknown attention 'spda'; choose one of ...; did you mean ...`.

    `otherwise` follows the known names, such as `, or a function of your own`.
    """
    known = list(known)
    return UsageError(f"unknown {what} {name!r}; choose one of {', '.join(known)}{otherwise}{suggest(name, known)}")


def check_at_least(limit: int, **values: float) -> None:
    """Raises UsageError for the first value below the limit, by its name."""
    for name, value in values.items():
        if value < limit:
            raise UsageError(f"{name} is {value}; it must be at least {limit}")


def check_groups(size: int, devices: int) -> None:
    """Raises UsageError where devices cannot stand in groups of a size, which compute a batch together."""
    if devices % size:
        raise UsageError(f"a tensor_parallel_size of {size} does not divide {devices} devices")


def check_divides(devices: int, **values: int) -> None:
    """Raises UsageError for the first value that so many devices cannot share, by its name."""
    for name, value in values.items():
        if value % devices:
            raise UsageError(f"{name} is {value}, which {devices} devices cannot share; split over fewer")


def find_modules_in_current_folder() -> None:
    """Let a user's module be found beside where the command is given."""
    # As `python -m` does; an installed command leaves it out.
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)


def import_named(what: str, path: str) -> Any:
    """What a module of the user's has under a name, `my_module.MyClass` or `my_module:my_function`; `what` says where
    it was named.

    Raises:
        UsageError: there is no such module or name in it, or its own code failed, with the line.
    """
    module_name, separator, name = path.rpartition(":" if ":" in path else ".")
    if not module_name or name == "py":
        raise UsageError(f"{what}: name it with its module, as in my_file.MyClass")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        if isinstance(error, SyntaxError):
            place = f"{error.filename}:{error.lineno}"
        reason = f"importing {module_name} failed at {place}: {type(error).__name__}: {' '.join(str(error).split())}"
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


#: Variables with the number of processes, and with the place of this one among them.
_COUNT = re.compile(
    "(LOCAL_)?WORLD_SIZE|SLURM_(NTASKS|NPROCS|NTASKS_PER_NODE)|FLUX_JOB_SIZE|PMI_SIZE"
    "|(OMPI_COMM_WORLD|MV2_COMM_WORLD|JSM_NAMESPACE)_SIZE"
)
_PLACE = re.compile(
    "((LOCAL|NODE|GROUP)_)?RANK|SLURM_(PROCID|LOCALID)|FLUX_TASK_RANK|PMI_RANK"
    "|(OMPI_COMM_WORLD|MV2_COMM_WORLD|JSM_NAMESPACE)_RANK"
)


def check_launcher(world_size: int = 1) -> None:
    """Raises UsageError where a variable says that this is one of more processes than `world_size`, or holds no
    number."""
    for name, value in os.environ.items():
        most = world_size if _COUNT.fullmatch(name) else world_size - 1
        if most == world_size or _PLACE.fullmatch(name):
            if not value.isdecimal():
                raise UsageError(f"{name} is {value!r}; a launcher of processes sets a whole number there; unset it")
            if int(value) > most:
                raise UsageError(
                    f"{name} is {value}: this is one process of several, and {world_size} is to be measured; ask for "
                    f"all with --trainer.devices and --trainer.num_nodes, start one alone, or unset {name}"
                )
