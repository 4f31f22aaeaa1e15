"""What a command that has more to say than a screen holds shows of it: the answer, then tables by name, or all."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmbench.errors import UsageError, suggest
from lmbench.report.table import Line, Part, Table

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Chosen:
    """What was asked for beside the answer: tables by their names, or all of them, and the lines that go with them."""

    names: tuple[str, ...] = ()
    is_all: bool = False


def print_chosen(
    chosen: Chosen,
    tables: Sequence[Table],
    everything: Sequence[Part],
    answer: Sequence[Part],
    console: Console,
    *,
    whole: Collection[str] = (),
) -> None:
    """Print the answer, or the tables that were chosen instead, in their own order, or everything.

    Args:
        whole: labels of lines that are not folded, to be copied.

    Raises:
        UsageError: a table was chosen that there is none of.
    """
    # Here: the options' help does not wait for it.
    from lmbench.report.screen import print_parts

    known = list(dict.fromkeys(table.name for table in tables))
    for name in chosen.names:
        if name not in known:
            near = suggest(name, known)
            raise UsageError(f"--table {name!r} is none that there is; choose among {', '.join(known)}{near}")
    named = [table for table in tables if table.name in chosen.names]
    print_parts(named or (everything if chosen.is_all else answer), console, whole=whole)


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--table` and `--all`."""
    parser.add_argument(
        "--table", metavar="NAME,...", default="", help="these tables instead of the answer; its last line names them"
    )
    parser.add_argument("--all", action="store_true", help="the answer, then all tables and what was recorded")


def chosen_of(options: argparse.Namespace, *others: object) -> Chosen:
    """What was asked for; `others` are the forms of output that have everything.

    Raises:
        UsageError: both options, or one of them beside another form of output.
    """
    names = tuple(name.strip() for name in options.table.split(",") if name.strip())
    if names and options.all:
        raise UsageError("--all has every table; leave --table out")
    if (names or options.all) and any(others):
        raise UsageError("--table and --all are for the screen; other forms of output have everything")
    return Chosen(names, options.all)


def more(tables: Sequence[Table]) -> Line:
    """The last line below an answer: how the tables are asked for."""
    names = dict.fromkeys(table.name for table in tables)
    return "tables", f"{', '.join(names)}; --table NAME or --all"
