"""The two sides of `lmbench compare --run`, from the words of the command to a sweep of two cells."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmbench.errors import UsageError
from lmbench.files import names_file
from lmbench.masking import is_secret
from lmbench.records.store import RESULTS, SWEEP_FILE, check_name, time_stamp
from lmbench.records.vocabulary import Values
from lmbench.sweep.environments import resolve_revision
from lmbench.sweep.file import CONFIG, ENVIRONMENT, MOST_ROUNDS, Options, SweepFile, sweep_from
from lmbench.sweep.folder import read_sweep_folder

_OPTION = re.compile(r",(?=[A-Za-z_][\w.]*\+?=)")
#: The `@` in front of options, unlike one in the name of a folder.
_MARK = re.compile("@(?=[^/@]*(?:=|$))")
#: The settings of the window. Where the user gives one of them, windows are left as they are.
WINDOW = ("measure.min_window_s", "measure.steps")
#: Rounds and windows where each round is a task elsewhere.
_TASK_ROUNDS, _TASK_WINDOW = 32, (2.0, 10)
#: Settings of both sides where the user gives none. Only the first round probes, and it delays the verdict.
_DEFAULTS = {"measure.probe_steps": 1}


@dataclass(frozen=True)
class SideOptions:
    """What differs between two sides that are measured now, and how they are measured.

    Args:
        budget: time for --run: 90s, 10m, 1h (10m), or auto: as long as the gate needs
        revision: A and B of the code; `.` is the tree as it is
        python: interpreters of A and B
        variable: an environment variable and its two values
        results_dir: where --run puts its folder (results)
        name: name of that folder
        timeout_s: seconds a run may take (600)
        on: where --run measures its rounds, as in `lmbench sweep` (local)
    """

    budget: str | None = None
    revision: tuple[str, str] | None = None
    python: tuple[str, str] | None = None
    variable: list[tuple[str, str, str]] | None = None
    results_dir: Path | None = None
    name: str | None = None
    timeout_s: float | None = None
    on: str | None = None


def find_sides(
    sides: Sequence[str], settings: Options, options: SideOptions, *, is_elsewhere: bool
) -> tuple[Path, SweepFile]:
    """The folder and the sweep of two sides: new ones, or those to go on with.

    Args:
        sides: configurations, or the folder to go on with.
        settings: settings of both sides.
        is_elsewhere: each round is a task on another machine.

    Raises:
        UsageError: something is not there, or not understood.
    """
    first = Path(sides[0]) if len(sides) == 1 else None
    if first is not None and names_file(first / SWEEP_FILE):
        if settings or options.variable or options.revision or options.python or options.name:
            raise UsageError(f"{first} is a comparison to go on with; it has its options already")
        file = read_sweep_folder(first)
        if not file.sides:
            raise UsageError(f"{first} is a sweep without sides; `lmbench compare` compares it, without --run")
        return first.absolute(), file.changed({}, None, options.timeout_s)
    name = options.name or f"compare-{time_stamp()}"
    check_name("--name", name)
    file = two_sides(sides, settings, options)
    path = (options.results_dir or RESULTS) / name
    if (path / SWEEP_FILE).is_file():
        raise UsageError(f"{path} is there already; `lmbench compare --run {path}` goes on with it")
    if is_elsewhere:
        # Tasks begin beside each other, and none knows of the others' noise.
        window = {} if has_window(file) else dict(zip(WINDOW, _TASK_WINDOW, strict=True))
        file = file.changed(window, _TASK_ROUNDS)
    return path, file


def has_window(file: SweepFile) -> bool:
    """Whether a sweep of two sides sets the window of either."""
    return bool({*WINDOW} & {*file.base}.union(*file.sides.values()))


def two_sides(configs: Sequence[str], settings: Options, options: SideOptions) -> SweepFile:
    """The sweep that measures two sides. It stores the commits of revisions, because names of revisions may move.

    Args:
        configs: A and B, each `CONFIG[@NAME=VALUE,NAME=VALUE...]`; a single one stands for both.
        settings: settings of both sides.

    Raises:
        UsageError: a configuration, an option or a revision does not exist or cannot be understood.
    """
    if len(configs) not in (1, 2):
        example = "smoke smoke@model.attention=naive"
        raise UsageError(f"give one or two configurations, A and B, such as `{example}`; {len(configs)} given")
    pairs = options.variable or []
    for variable in filter(is_secret, (variable for variable, *_ in pairs)):
        raise UsageError(f"{variable} looks like a secret, and sides go by their variables; export it instead")
    environments: Values = {}
    sides: dict[str, Options] = {}
    texts, neither = (configs[0], configs[-1]), (None, None)
    names = _apart(*options.python) if options.python else neither
    given = zip("AB", texts, options.revision or neither, options.python or neither, names, strict=True)
    for index, (side, text, revision, python, name) in enumerate(given):
        config, *words = [text] if names_file(text) else _MARK.split(text, maxsplit=1)
        if not config or " --" in config:
            raise UsageError(f"{text!r}: give a configuration, and its options as CONFIG@NAME=VALUE,NAME=VALUE")
        sides[side] = {CONFIG: config, **(read_settings(*words) if words else {})}
        if repeated := sides[side].keys() & settings:
            raise UsageError(f"--{repeated.pop()} is for both sides, and one has its own; give it once")
        values = {variable: pair[index] for variable, *pair in pairs}
        parts = ["here" if revision == "." else revision, name, *map("=".join, values.items())]
        if environment := " ".join(filter(None, parts)):
            commit = None if revision in (None, ".") else resolve_revision(str(revision))[1]
            spec = {"revision": commit, "python": python, "variables": values}
            if environments.setdefault(environment, spec) != spec:
                raise UsageError(f"both sides would be called {environment!r}; give the revision as a commit")
            sides[side][ENVIRONMENT] = environment
    content = {"base": {**_DEFAULTS, **settings}, "sides": sides, "environments": environments, "repeats": MOST_ROUNDS}
    return sweep_from(content | {"coin_seed": secrets.randbits(32), "timeout_s": options.timeout_s})


def _apart(a: str, b: str) -> tuple[str, str]:
    """The folders and names in which two paths differ; the whole paths if these are no names of their own."""
    parts_a, parts_b = Path(a).parts, Path(b).parts
    own_a = "-".join(part for part in parts_a if part not in parts_b)
    own_b = "-".join(part for part in parts_b if part not in parts_a)
    return (own_a, own_b) if own_a and own_b and own_a != own_b else (a, b)


def read_settings(text: str) -> Options:
    """Settings given as `NAME=VALUE,NAME=VALUE`. Raises UsageError where one has no name or no value."""
    pairs = [word.partition("=") for word in _OPTION.split(text)]
    if not all(name and equals for name, equals, _ in pairs):
        raise UsageError(f"{text!r}: give options as NAME=VALUE,NAME=VALUE")
    return {name: value for name, _, value in pairs}
