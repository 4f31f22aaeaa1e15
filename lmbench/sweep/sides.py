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
    configs: Sequence[str],
    options: Options,
    revisions: Sequence[str] | None,
    pythons: Sequence[str] | None,
    variables: Mapping[str, Sequence[str]],
) -> SweepFile:
    """The sweep that compares two sides.

    Args:
        configs: A and B, each `CONFIG[@NAME=VALUE,NAME=VALUE...]`; one stands for both.
        options: of both sides.
        revisions: of A and of B; a commit that they name is kept, whatever becomes of the names. "." is what lies here.
        pythons: interpreters of A and of B.
        variables: environment variables by name, with the values of A and of B.

    Raises:
        UsageError: something of it is not there or not understood.
    """
    if len(configs) not in (1, 2):
        raise UsageError(f"compare --run takes one or two configurations, A and B; {len(configs)} given")
    for variable in filter(is_secret, variables):
        raise UsageError(f"{variable} looks like a secret, and sides go by their variables; export it instead")
    environments: dict[str, Any] = {}
    sides: dict[str, Options] = {}
    for index, (side, words) in enumerate((("A", configs[0]), ("B", configs[-1]))):
        config, _, rest = (words, "", "") if Path(words).is_file() else words.partition("@")
        pairs = [pair.partition("=") for pair in _OPTION.split(rest)] if config != words else []
        if not config or not all(name and equals for name, equals, _ in pairs):
            raise UsageError(f"{words!r}: give a configuration, and its options as CONFIG@NAME=VALUE,NAME=VALUE")
        sides[side] = {CONFIG: config, **{name: value for name, _, value in pairs}}
        if repeated := sides[side].keys() & options:
            raise UsageError(f"--{repeated.pop()} is for both sides, and one has its own; give it once")
        revision = revisions[index] if revisions else None
        python = pythons[index] if pythons else None
        values = {variable: pair[index] for variable, pair in variables.items()}
        parts = ["here" if revision == AS_IT_IS else revision, python, *map("=".join, values.items())]
        if environment := " ".join(filter(None, parts)):
            commit = None if revision in (None, AS_IT_IS) else resolve_revision(Path.cwd(), str(revision))[1]
            environments[environment] = {"revision": commit, "python": python, "variables": values}
            sides[side][ENVIRONMENT] = environment
    content = {"base": options, "sides": sides, "environments": environments, "repeats": MOST_ROUNDS}
    return sweep_from(content)
