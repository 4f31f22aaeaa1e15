"""Pandas frames as tables, by the descriptions in a package's tables.toml.

A description has, for each column of a table, its heading, its unit, and the frame's column that it shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

from lmbench.records.vocabulary import Values
from lmbench.report.answer import Column, Table
from lmbench.report.units import WORDS, Unit, instances, microseconds, milliseconds, percent, plain, whole

if TYPE_CHECKING:
    import pandas as pd

#: A row of a table, by the keys of its columns.
Row = Values


def signed_ms(difference_s: float) -> str:
    """A difference in ms with its sign, with as many decimals as a time of its size has; zero has no sign."""
    text = milliseconds(abs(difference_s))
    is_zero = not float(text.replace(",", ""))
    sign = "+" if difference_s > 0 else "-"
    return text if is_zero else sign + text


#: How a number is shown, by the unit that the description names, or else by the end of its column's name in the frame.
#: The unit stands in the caption and not in each heading, so that the tables fit into 80 columns.
_TEXTS = {
    "ms": milliseconds, "us": microseconds, "signed_ms": signed_ms, "count": instances, "fraction": percent,
    "whole": whole,
    # TFLOP/s or TB/s, as the row says.
    "tera": lambda value: f"{value / 1e12:.3g}",
    "giga": lambda value: plain(value * 1e-9),
    "bytes": lambda value: f"{value / 2**30:,.3f}",
    "signed_GiB": lambda value: f"{value / 2**30:+,.3f}",
    "MiB": lambda value: f"{value / 2**20:,.2f}",
    "MB": lambda value: f"{value / 1e6:.3g}" if value < 1e8 else f"{value / 1e6:,.0f}",
    "mega": lambda value: f"{value / 1e6:.0f}",
    "ratio": "{:.2f}".format, "small_ratio": "{:.4f}".format, "mean_s": microseconds, "s": milliseconds,
}  # fmt: skip


@cache
def _descriptions(package: str) -> Values:
    content: Values = msgspec.toml.decode((files(f"lmbench.{package}") / "tables.toml").read_bytes())
    return content


def records(frame: pd.DataFrame) -> list[Row]:
    """The rows of a frame by column; missing values are None."""
    rows: list[Row] = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return rows


def table(key: str, rows: pd.DataFrame, more: Iterable[Row] = (), name: str = "", **words: object) -> Table:
    """A frame as the table that tables.toml describes; columns that the frame lacks are left out.

    Args:
        key: package and table: `kernels/clocks` is [clocks] in lmbench/kernels/tables.toml.
        rows: the frame. If the description has a `top`, only that many rows are shown; with `rest`, a further row has
            the sums over all others.
        more: rows to append; values that they lack are blank.
        name: of the table, if it differs from the description's.
        words: values of the placeholders in the description.
    """
    package, _, described_name = key.partition("/")
    description = _descriptions(package)[described_name]
    top = description.get("top", len(rows))
    columns = []
    for heading, source in description["columns"].items():
        field, _, unit_name = source.format(**words).partition(" ")
        if field in rows.columns:
            by_end = next((text for end, text in _TEXTS.items() if field.endswith(f"_{end}") or field == end), None)
            text = _TEXTS.get(unit_name, by_end)
            unit = WORDS if text is None else Unit(text)
            is_shortened = unit is WORDS and field not in description.get("whole", ())
            is_extra = field in description.get("extra", ())
            columns.append(Column(heading.format(**words), unit, field, is_shortened, is_extra))
    shown, others = records(rows[:top]), rows[top:]
    if len(others) and "rest" in description:
        sums = others[description["sums"]].sum(min_count=1).to_frame().T
        label = f"{len(others)} more {description['rest'].format(**words)}"
        shown.append({columns[0].name: label, **records(sums)[0]})
    title, caption = (description.get(part, "").format(**words) for part in ("title", "caption"))
    cells = [[row.get(column.name, "") for column in columns] for row in [*shown, *more]]
    return Table(name or described_name, title, columns, cells, caption, description.get("has_total", False))
