"""Frames as tables by a room's tables.toml: for each column a heading, a unit, and the key of each row's value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from lmbench.report.answer import Column, Table
from lmbench.report.units import WORDS, Unit, instances, microseconds, milliseconds, percent, whole

if TYPE_CHECKING:
    import pandas as pd

#: A row of a table, by the keys of its columns.
Row = dict[str, Any]


def signed_ms(seconds: float) -> str:
    """A difference in ms with its sign and as many decimals as a time of its size."""
    text = milliseconds(abs(seconds))
    return f"{'+' if seconds > 0 else '-'}{text}" if float(text.replace(",", "")) else text


#: How a number is shown, by what its column's name ends in or names. The unit stands in the caption and not in each
#: heading: the tables fit into 80 columns.
_TEXTS: dict[str, Callable[[float], str]] = {
    "ms": milliseconds, "us": microseconds, "signed_ms": signed_ms, "count": instances, "fraction": percent,
    "whole": whole,
    # TFLOP/s or TB/s, as the row says.
    "tera": lambda value: f"{value / 1e12:.3g}",
    "giga": lambda value: f"{value / 1e9:.1f}",
    "bytes": lambda value: f"{value / 2**30:,.3f}",
    "MiB": lambda value: f"{value / 2**20:,.2f}",
    "MB": lambda value: f"{value / 1e6:.3g}",
    "mega": lambda value: f"{value / 1e6:.0f}",
    "ratio": "{:.2f}".format, "small_ratio": "{:.4f}".format, "mean_s": microseconds, "s": milliseconds,
}  # fmt: skip


@cache
def _descriptions(room: str) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.toml.decode((files(f"lmbench.{room}") / "tables.toml").read_bytes())
    return content


def records(frame: pd.DataFrame) -> list[Row]:
    """The rows of a frame by column; what is missing is None."""
    rows: list[Row] = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return rows


def table(key: str, rows: pd.DataFrame, more: Iterable[Row] = (), name: str = "", **words: object) -> Table:
    """A frame as the table that a room describes, without columns that the frame lacks.

    Args:
        key: room and table: `kernels/clocks` is [clocks] in lmbench/kernels/tables.toml.
        rows: by the keys of the columns. Where the description has a `top`, so many are shown, and behind them, with
            `rest`, the sums of all others.
        more: rows behind them; what they lack is left blank.
        name: of the table where it is not that of the key.
        words: what the description leaves to the caller.
    """
    room, _, own_name = key.partition("/")
    description = _descriptions(room)[own_name]
    top = description.get("top", len(rows))
    columns, keys = [], []
    for heading, reading in description["columns"].items():
        field, _, unit_name = reading.partition(" ")
        if field in rows.columns:
            by_end = next((text for end, text in _TEXTS.items() if field.endswith(f"_{end}") or field == end), None)
            text = _TEXTS.get(unit_name, by_end)
            unit = WORDS if text is None else Unit("", 1.0, text)
            title = heading.format(**words)
            is_shortened = unit is WORDS and field not in description.get("whole", ())
            is_extra = field in description.get("extra", ())
            columns.append(Column(title, unit, field, is_shortened, is_extra))
            keys.append(field)
    shown, left = records(rows[:top]), rows[top:]
    if len(left) and "rest" in description:
        sums = left[description["sums"]].sum(min_count=1).to_frame().T
        shown.append({keys[0]: f"{len(left)} more {description['rest'].format(**words)}", **records(sums)[0]})
    title, caption = (description.get(part, "").format(**words) for part in ("title", "caption"))
    cells = [[row.get(field, "") for field in keys] for row in [*shown, *more]]
    return Table(name or own_name, title, columns, cells, caption, description.get("has_total", False))
