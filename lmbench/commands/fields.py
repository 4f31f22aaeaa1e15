"""`lmbench fields`: what a number of a record means, its unit, and which direction is good."""

from __future__ import annotations

import re

from lmbench.errors import UsageError, suggest
from lmbench.records.schema import RECORDS
from lmbench.records.schema import fields as fields_of
from lmbench.report.answer import Answer, Column, Table, Value

_COLUMNS = (Column("field", name="name"), Column("unit"), Column("better"), Column("meaning", narrowing="fold"))


def fields(*names: str) -> Answer:
    """Tells what the fields of a record mean.

    All of them, or those that are named (`step_s`, `phases.<phase>.mean_s`), that end so (`mean_s`), lie in a
    part (`memory`) or have a word in them (`mfu`). run.json, W&B and a study's columns have them under these
    names. Records hold SI units; ms, GiB and % exist only where they are shown.

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
    for field in chosen:
        row: list[Value] = [field.pattern, field.unit, field.about.better, field.about.meaning]
        groups.setdefault(field.group, {}).setdefault(field.pattern, row)
    tables = [
        Table(re.sub(r"\W+", "_", group.lower()), group, _COLUMNS, list(rows.values()))
        for group, rows in groups.items()
    ]
    every = [[group, *row] for group, rows in groups.items() for row in rows.values()]
    return Answer(tables=tables, data=lambda: Table("fields", "Fields", [Column("group"), *_COLUMNS], every))
