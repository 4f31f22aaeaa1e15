"""Tables whose columns name what they read: a heading, a unit, and the path of an attribute of each row's item."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from lmbench.report.answer import Column, Table, Value
from lmbench.report.units import WORDS, Unit, instances, microseconds, milliseconds, percent

# Units that stand in the caption and not in each heading: the tables fit into 80 columns.
MS = Unit("", 1e3, milliseconds)
US = Unit("", 1e6, microseconds)
NUMBER = Unit("", 1.0, instances)
SHARE = Unit("", 100.0, percent)

#: Heading, unit, and the path of an attribute (`clock.busy_s`), whose last word is the column's key.
Reading = tuple[str, Unit, str]


def table_of(name: str, title: str, caption: str, items: Iterable[Any], *columns: Reading) -> Table:
    """A table with a row for each item; what an item lacks is left blank."""
    headings = [
        Column(heading, unit, path.rpartition(".")[2], narrowing="shorten" if unit is WORDS else "keep")
        for heading, unit, path in columns
    ]
    return Table(name, title, headings, [[_read(item, path) for *_, path in columns] for item in items], caption)


def _read(item: Any, path: str) -> Value:
    for name in path.split("."):
        item = getattr(item, name, "")
    value: Value = item
    return value


def row(item: Any, **changes: Any) -> SimpleNamespace:
    """An item's public attributes with some of them changed or added; None for no item."""
    names = () if item is None else (name for name in dir(item) if not name.startswith("_"))
    return SimpleNamespace(**{name: getattr(item, name) for name in names} | changes)


def counted(number: int, word: str, several: str | None = None) -> str:
    """A number with its word, in plural where it is not 1."""
    return f"{number:,} {word if number == 1 else several or f'{word}s'}"
