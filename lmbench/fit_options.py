"""The options of `lmbench fit` by name. They are kept in a table, since the parser that has them imports PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from lmbench.configs import placed, shipped_configs
from lmbench.errors import UsageError, suggest

#: Every option by its full name (`trainer.precision`), and the groups themselves (`trainer`).
OPTIONS = [
    name
    for line in Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
    for name in line.split()
]


def group_options(group: str) -> list[str]:
    """All options of a group by their full names; empty for a name that is no group."""
    return [name for name in OPTIONS if name.startswith(f"{group}.")]


def check_options(words: Sequence[str], places: Mapping[str, str] = {}, problems: Sequence[str] = ()) -> None:
    """Check the words of `lmbench fit` for misspelt options. Options of a user's class are not checked.

    `places` says where options stand in a file. `problems` are other mistakes in that file.

    Raises:
        UsageError: there are problems, or unknown options. Each of these is named with its place and the most similar
            option.
    """
    options = dict.fromkeys(_options(words))
    shipped = {name: path.read_text("utf-8") for name, path in shipped_configs().items()}
    class_groups = {"optimizer", "lr_scheduler"}
    for name, value in options:
        if name in ("model", "data") or (name == "config" and "class_path" in shipped.get(value, "class_path")):
            class_groups |= {"model", "data"}
    lines = []
    for name, _ in options:
        group, *rest = name.split(".")
        belongs_to_class = group in class_groups or rest[:1] == ["init_args"]
        if not belongs_to_class and ".".join([group, *rest[:1]]) not in OPTIONS:
            lines.append(placed(f"unknown option --{name}{suggest(name, OPTIONS, '--{}')}", places))
    if lines:
        lines[-1] += " (`lmbench fit --help` lists them all)"
    if lines or problems:
        raise UsageError("; ".join([*lines, *problems]))


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options with their values. A first word without an option names a configuration."""
    if words and not words[0].startswith("-"):
        yield "config", words[0]
    for word, next_word in zip_longest(words, words[1:], fillvalue=""):
        # A word such as -1 is a value.
        if match := re.match(r"-+([A-Za-z][^=]*)(=.*)?", word):
            name = "config" if match[1] == "c" else match[1].removesuffix("+")
            yield name, next_word if match[2] is None else match[2][1:]
