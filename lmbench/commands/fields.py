"""`lmbench fields`: what a number of a record means, its unit, and which direction is good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from lmbench.commands.parser import CommandParser, command
from lmbench.errors import ExitCode, UsageError, suggest
from lmbench.records.codec import indented_json
from lmbench.records.schema import RECORDS, SchemaField, fields
from lmbench.report.markdown import table_lines
from lmbench.report.screen import make_console, print_line
from lmbench.report.table import Table, fact, words
from lmbench.standard_output import write_result

DESCRIPTION = """\
Tells what the fields of a record mean: all of them by their names, or in full those
that are named (`step_s`, `phases.<phase>.mean_s`), that end so (`mean_s`), lie in a
part (`memory`) or have a word in them (`mfu`). run.json, W&B and a study's columns
have them under these names. Records hold SI units; ms, GiB and % exist only where
they are shown."""


_NAME_WIDTH = 52


@command
def run(args: list[str]) -> int:
    """Print them; returns the exit code."""
    parser = CommandParser("fields", DESCRIPTION)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a field, its last word, or a part of the record")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--format", choices=("markdown",), help="tables to paste")
    output.add_argument("--json", action="store_true", help="as JSON on standard output")
    options = parser.parse_args(args[1:])
    found = _named(options.names)
    if options.json:
        told = [{"name": each.pattern, "group": each.group, **asdict(each.about)} for each in found]
        write_result(indented_json(told))
    elif options.format:
        for table in _tables(found):
            print("\n".join([*table_lines(table), ""]))
    else:
        _print(found, is_whole=bool(options.names))
    return ExitCode.OK


def _named(names: Sequence[str]) -> list[SchemaField]:
    """Those that are named, else all; of fields that differ only in their phase, the first."""
    every = [each for kind in RECORDS for each in fields(kind).values()]
    found = every if not names else []
    for name in names:
        here = [each for each in every if _is_called(each, name)] or [each for each in every if name in each.name]
        if not here:
            known = {word for each in every for word in (each.name, each.name.rpartition(".")[2])}
            raise UsageError(f"no field is called {name!r}{suggest(name, known)}; `lmbench fields` lists them all")
        found += here
    return list({(each.group, each.pattern): each for each in reversed(found)}.values())[::-1]


def _is_called(field: SchemaField, name: str) -> bool:
    return any(
        name == own or own.endswith(f".{name}") or own.startswith(f"{name}.") for own in (field.name, field.pattern)
    )


def _print(found: list[SchemaField], is_whole: bool) -> None:
    console = make_console()
    group = ""
    for each in found:
        if each.group != group:
            console.print(each.group if not group else f"\n{each.group}", style="bold")
            group = each.group
        unit = each.unit + {"up": ", more is better", "down": ", less is better", None: ""}[each.about.better]
        if is_whole:
            console.print(f"  {each.pattern} ({unit})", soft_wrap=True)
            print_line("", each.about.meaning, console, width=3)
        else:
            line = f"  {each.pattern:<{_NAME_WIDTH}} {unit}"
            # One longer than the screen has its unit below it.
            fits = len(line) <= console.width
            console.print(line if fits else f"  {each.pattern}\n{'':{_NAME_WIDTH + 3}}{unit}", soft_wrap=True)


def _tables(found: list[SchemaField]) -> list[Table]:
    groups: dict[str, Table] = {}
    for each in found:
        table = groups.setdefault(each.group, Table(each.group, "", words("field", "unit", "better", "meaning"), []))
        table.rows.append(
            [fact(text) for text in (each.pattern, each.unit, each.about.better or "", each.about.meaning)]
        )
    return list(groups.values())
