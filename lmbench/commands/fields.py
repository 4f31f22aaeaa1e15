"""`lmbench fields`: the meaning of each field of a record, its unit, and which direction is better."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from lmbench.errors import UsageError, suggest
from lmbench.records.guards import rules
from lmbench.records.schema import RECORDS
from lmbench.records.schema import fields as fields_of
from lmbench.report.answer import Answer, Column, Table, Value
from lmbench.report.units import COUNT
from lmbench.sizes import COURSE_NAMES, SIZES

if TYPE_CHECKING:
    from lmbench.report.columns import Quantity

_COLUMNS = (
    Column("group", is_extra=True), Column("field", name="name"), Column("unit"), Column("better"),
    Column("meaning"),
)  # fmt: skip


def fields(*names: str) -> Answer:
    """Tells what the fields of a record, the columns of reports and the guards mean.

    A name is that of a field (`step_s`, `phases.<phase>.mean_s`), its last word (`mean_s`), a part of the record
    (`memory`), a group, a word in names of fields (`mfu`), a column (`speedup`) or its heading (`"step CV"`), or a
    guard (`spread`). Without a name, the groups of fields are listed; `size` also lists the named sizes of models.
    Fields have these names in run.json, in W&B and as columns of a study. Records hold SI units; ms, GiB and % exist
    only where they are shown.

    Args:
        names: a field, its last word, a part of the record, a column, its heading, or a guard
    """
    quantities: Mapping[str, Quantity] = {}
    if names:
        # Imported here, since the columns of all rooms take longer to import than all fields.
        from lmbench.catalogue import make_catalogue

        quantities = make_catalogue().columns
    all_fields = [field for kind in RECORDS for field in fields_of(kind).values()]
    chosen, columns = [], list[list[Value]]()
    for name in names or [""]:
        # A heading such as `step CV (%)` ends in its unit.
        heading = name.partition(" (")[0]
        titled: list[list[Value]] = [
            [key, column.meaning] for key, column in quantities.items() if heading in (key, column.title)
        ]
        columns += titled
        part = re.compile(rf"(.*\.)?{re.escape(name)}(\..*)?")
        matches = (
            [field for field in all_fields if part.fullmatch(field.name) or part.fullmatch(field.pattern)]
            or [field for field in all_fields if name == _slug(field.group) or name in field.name]
            # A key of a mapping, such as `scalars.NAME`, is told by the mapping.
            or [field for field in all_fields if name.startswith(f"{field.name}.")]
        )
        if not matches and not titled and name not in rules():
            words = {word for field in all_fields for word in (field.name, field.name.rpartition(".")[2])}
            near = suggest(name, {*words, *quantities, *rules()})
            raise UsageError(f"no field is called {name!r}; `lmbench fields` lists them all{near}")
        chosen += matches
    # Fields that differ only in their phase share a row.
    abouts = {(field.group, field.pattern): field.about for field in chosen}
    rows = [[_slug(group), name, about.unit, about.better, about.meaning] for (group, name), about in abouts.items()]
    table = Table("fields", "Fields", _COLUMNS, rows)
    guards: list[list[Value]] = [[name, *rules()[name].texts] for name in names if name in rules()]
    if names:
        tables = [
            table,
            Table("columns", "Columns of reports", [Column("column"), Column("meaning")], columns),
            Table("guards", "Guards", [Column("guard"), Column("message"), Column("advice")], guards),
        ]
        return Answer(tables=[part for part in tables if part.rows] + ([_sizes()] if "size" in names else []))
    groups = Counter(group for group, _ in abouts).items()
    about: list[list[Value]] = [[_slug(group), count, group.partition(": ")[2]] for group, count in groups]
    titles = (Column("group"), Column("fields", COUNT), Column("meaning"))
    return Answer(tables=[table, Table("groups", "Fields of a run and of its steps", titles, about)], first=["groups"])


def _sizes() -> Table:
    """The named sizes of lmbench's model, with their names in Stanford's course."""
    numbers = [Column(name, COUNT) for name in ("d_model", "d_ff", "layers", "heads", "parameters")]
    columns = [Column("size"), *numbers, Column("CS336")]
    figures_of = attrgetter("d_model", "d_ff", "num_layers", "num_heads", "parameter_count")
    rows = [[name, *figures_of(shape), COURSE_NAMES.get(name)] for name, shape in SIZES.items()]
    caption = "parameters with a vocabulary of 10,000; CS336: the years in which the course's assignment 2 has it"
    return Table("sizes", "Model sizes", columns, rows, caption)


def _slug(group: str) -> str:
    return re.sub(r"\W+", "_", group.partition(": ")[0].lower())
