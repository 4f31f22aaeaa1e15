"""Tables whose columns name what they read: a heading, a unit, and the key of each row's value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lmbench.report.answer import Column, Table
from lmbench.report.units import WORDS, Unit, instances, microseconds, milliseconds, percent

if TYPE_CHECKING:
    import pandas as pd

# Units that stand in the caption and not in each heading: the tables fit into 80 columns.
MS = Unit("", 1e3, milliseconds)
US = Unit("", 1e6, microseconds)
NUMBER = Unit("", 1.0, instances)
SHARE = Unit("", 100.0, percent)

#: A row of a table, by the keys of its columns.
Row = dict[str, Any]
#: Heading, unit and key of a column.
Reading = tuple[str, Unit, str]


_UNITS = {
    "mean_s": US, "median_kernel_s": US, "gap_s": US, "launch_interval_s": US, "_fraction": SHARE, "_s": MS,
    "_count": NUMBER, "calls": NUMBER, "launches": NUMBER, "kernels": NUMBER, "more": NUMBER,
}  # fmt: skip


def reading(**keys: str) -> list[Reading]:
    """Columns by their headings, with the unit that a key's end names; times are in us or ms, words have none."""
    units = {key: next((unit for end, unit in _UNITS.items() if key.endswith(end)), WORDS) for key in keys.values()}
    return [(heading.replace("_", " ").strip(), units[key], key) for heading, key in keys.items()]


def records(frame: pd.DataFrame) -> list[Row]:
    """The rows of a frame by column; what is missing is None."""
    rows: list[Row] = frame.to_dict("records")
    # What is missing is NaN, which is not equal to itself.
    return [{name: value if value == value else None for name, value in row.items()} for row in rows]  # noqa: PLR0124


def sum_of(rows: Sequence[Row], columns: Iterable[str], **labels: str) -> Row:
    """A row with the sums of these columns; None where no row has a value."""
    known = {name: [row[name] for row in rows if row.get(name) is not None] for name in columns}
    return {name: sum(values) if values else None for name, values in known.items()} | labels


def with_rest(rows: Sequence[Row], top: int, columns: Iterable[str], key: str, words: str) -> list[Row]:
    """The first rows, and one with sums of columns of all others, `3 more kernels`."""
    rest = rows[top:]
    return [*rows[:top], *([sum_of(rest, columns, **{key: f"{len(rest)} more {words}"})] if rest else [])]


def table_of(name: str, title: str, caption: str, items: Iterable[Row], *columns: Reading) -> Table:
    """A table with a row for each item; what an item lacks is left blank."""
    headings = [
        Column(text, unit, key, narrowing="shorten" if unit is WORDS else "keep") for text, unit, key in columns
    ]
    return Table(name, title, headings, [[item.get(key, "") for *_, key in columns] for item in items], caption)


def row(item: Any, **changes: Any) -> Row:
    """An item's public attributes with some of them changed or added."""
    return {name: getattr(item, name) for name in dir(item) if not name.startswith("_")} | changes
