"""`lmbench fields`: what a number of a record means, its unit, and which direction is good."""

from __future__ import annotations

import re

from lmbench.errors import UsageError, suggest
from lmbench.records.schema import RECORDS
from lmbench.records.schema import fields as fields_of
from lmbench.report.answer import Answer, Column, Table, Value
from lmbench.report.units import COUNT

_COLUMNS = (Column("field", name="name"), Column("unit"), Column("better"), Column("meaning", narrowing="fold"))
_GROUPS = (Column("group"), Column("fields", COUNT), Column("meaning", narrowing="fold"))


def fields(*names: str) -> Answer:
    """Tells what the fields of a record mean.

    Those that are named (`step_s`, `phases.<phase>.mean_s`), that end so (`mean_s`), lie in a part (`memory`) or
    have a word in them (`mfu`); without a name the groups of all. run.json, W&B and a study's columns have them
    under these names. Records hold SI units; ms, GiB and % exist only where they are shown.

    Args:
        names: a field, its last word, or a part of the record
    """
    known = [field for kind in RECORDS for field in fields_of(kind).values()]
    chosen = [] if names else known
    for name in names:
        part = re.compile(rf"(.*\.)?{re.escape(name)}(\..*)?")
        exact = [field for field in known if part.fullmatch(field.name) or part.fullmatch(field.pattern)]
        matches = exact or [field for field in known if name in field.name]
        if not matches:
            words = {word for field in known for word in (field.name, field.name.rpartition(".")[2])}
            raise UsageError(f"no field is called {name!r}{suggest(name, words)}; `lmbench fields` lists them all")
        chosen += matches
    # Of fields that differ only in their phase, the first.
    groups: dict[str, dict[str, list[Value]]] = {}
    meanings: dict[str, dict[str, None]] = {}
    for field in chosen:
        group, _, meaning = field.group.partition(": ")
        meanings.setdefault(group, {}).setdefault(meaning)
        row: list[Value] = [field.pattern, field.unit, field.about.better, field.about.meaning]
        groups.setdefault(group, {}).setdefault(field.pattern, row)
    tables = [
        Table(_slug(group), group, _COLUMNS, list(rows.values()), caption="; ".join(meanings[group]))
        for group, rows in groups.items()
    ]
    every = [[group, *row] for group, rows in groups.items() for row in rows.values()]
    summary: list[list[Value]] = [
        [_slug(group), len(rows), "; ".join(meanings[group])] for group, rows in groups.items()
    ]
    about = Table("groups", "Fields of a run and of its steps", _GROUPS, summary)
    return Answer(
        tables=[*([] if names else [about]), *tables],
        first=None if names else ["groups"],
        data=lambda: Table("fields", "Fields", [Column("group"), *_COLUMNS], every),
    )


def _slug(group: str) -> str:
    return re.sub(r"\W+", "_", group.lower())
