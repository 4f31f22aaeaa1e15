"""A sweep of two sides, as `compare --run` words it: configurations, options, revisions, Pythons, variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmbench.errors import UsageError
from lmbench.masking import is_secret
from lmbench.sweep.environments import resolve_revision
from lmbench.sweep.file import CONFIG, ENVIRONMENT, Options, SweepFile, sweep_from

#: More rounds than this are never made, whatever the budget.
MOST_ROUNDS = 200
#: The revision that is no revision: the working tree as it is.
AS_IT_IS = "."

_OPTION = re.compile(r",(?=[A-Za-z_][\w.]*\+?=)")


def two_sides(
    given: Sequence[str],
    options: Options,
    revisions: Sequence[str] | None,
    pythons: Sequence[str] | None,
    variables: Mapping[str, Sequence[str]],
) -> SweepFile:
    """The sweep that compares two sides.

    Args:
        given: A and B, each `CONFIG[@NAME=VALUE,NAME=VALUE...]`; one stands for both.
        options: of both sides.
        revisions: of A and of B; a commit that they name is kept, whatever becomes of the names. "." is what lies here.
        pythons: interpreters of A and of B.
        variables: environment variables by name, with the values of A and of B.

    Raises:
        UsageError: something of it is not there or not understood.
    """
    if len(given) not in (1, 2):
        raise UsageError(f"compare --run takes one or two configurations, A and B; {len(given)} given")
    for variable in variables:
        if is_secret(variable):
            raise UsageError(f"{variable} looks like a secret, and sides go by their variables; export it instead")
    environments: dict[str, Any] = {}
    sides: dict[str, Options] = {}
    for index, (name, words) in enumerate((("A", given[0]), ("B", given[-1]))):
        sides[name] = _side(words)
        revision, python = (None if pair is None else pair[index] for pair in (revisions, pythons))
        values = {variable: pair[index] for variable, pair in variables.items()}
        parts = [*filter(None, (revision, python)), *(f"{variable}={value}" for variable, value in values.items())]
        if parts:
            environment = " ".join("here" if part == AS_IT_IS else part for part in parts)
            commit = None if revision in (None, AS_IT_IS) else resolve_revision(Path.cwd(), str(revision))[1]
            environments[environment] = {"revision": commit, "python": python, "variables": values}
            sides[name][ENVIRONMENT] = environment
    for option in options:
        if any(option in side for side in sides.values()):
            raise UsageError(f"--{option} is for both sides, and one has its own; give it once")
    content = {"base": options, "sides": sides, "environments": environments, "repeats": MOST_ROUNDS}
    return sweep_from(content)


def _side(given: str) -> Options:
    config, mark, rest = given.partition("@")
    if Path(given).is_file():
        config, mark, rest = given, "", ""
    pairs = [pair.partition("=") for pair in _OPTION.split(rest)] if mark else []
    if not config or not all(name and equals for name, equals, _ in pairs):
        raise UsageError(f"{given!r}: give a configuration, and its options as CONFIG@NAME=VALUE,NAME=VALUE")
    return {CONFIG: config, **{name: value for name, _, value in pairs}}
