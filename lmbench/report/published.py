"""Columns with figures from elsewhere (`--reference`), each beside the report's own column of the same quantity.

The figures are those of five write-ups, or of a report's CSV file: the shipped one of an H200, or a user's.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lmbench.errors import UsageError, unknown
from lmbench.files import Unreadable, read_file
from lmbench.reference import FOLDER
from lmbench.report.answer import Cell
from lmbench.report.columns import STEP, Quantity
from lmbench.report.facts import EAGER, FACT, Value
from lmbench.report.frame import Frame
from lmbench.report.view import Feature

_PUBLISHED = "published"
#: Facts of where, when and how long was measured: a row of another report may differ from a cell in these.
_CIRCUMSTANCES = {"gpu", "warmup", "environment", "torch", "commit", "host"}
#: Columns shown of another report; all of its columns would double each table.
_COMPARED = (STEP.name, "tokens_per_s", "peak_bytes")
#: The facts of a cell that does not state them.
_USUAL: Mapping[str, Value] = {
    "attention": "naive", "heads": 1, "checkpoint": "none", "compile": EAGER, "head_dim": "none"
}  # fmt: skip
_MOST_BYTES = 2**24
#: A table has a column for each GPU.
_MOST_GPUS = 100
#: No time, rate or size of a report is larger.
_LARGEST = 1e15


class _Row(NamedTuple):
    """Another's configuration, by the facts that it states as text, with its figures by column."""

    stated: Mapping[str, str]
    figures: Mapping[str, Cell]


def reference_feature(name: str) -> Feature:
    """The feature that shows a reference's figures beside each column, in a column for each GPU or write-up.

    Args:
        name: `published`, `h200`, or a file that `lmbench report --format csv` wrote.

    Raises:
        UsageError: the reference does not exist, or the file was not written by a report.
    """
    rows = _write_ups() if name == _PUBLISHED else _report(name)

    def beside(column: Quantity) -> Iterator[Quantity]:
        for label in sorted(label for label in rows if any(column.name in row.figures for row in rows[label])):
            title = f"ref. {label}" + (f": {column.title}" if column is not STEP else "")
            figure = partial(_figure, rows[label], column.name)
            yield Quantity(f"reference {label}: {column.name}", title, figure, column.unit, None)

    return Feature(beside=beside)


def _figure(rows: Sequence[_Row], column: str, frame: Frame, cell: int) -> Cell | None:
    """The figure of the first row of which the cell has every stated fact.

    If the cells differ in size or context, a row must state that.
    """
    facts = {name: str(value) for name, value in {**_USUAL, **frame.facts[cell]}.items()}
    differing = {name for name in ("size", "context") if len(frame.values.get(name, ())) > 1}
    for row in rows:
        if column in row.figures and row.stated.items() <= facts.items() and differing <= row.stated.keys():
            return row.figures[column]
    return None


def _write_ups() -> dict[str, list[_Row]]:
    """The figures of each write-up, those that state most first.

    What a write-up does not state is a caveat, but it recomputes nothing, and has one head in attention by itself.
    """
    rows = defaultdict[str, list[_Row]](list)
    for row in csv.DictReader((FOLDER / "figures.csv").read_text("utf-8").splitlines()):
        stated = {name: row[name] for name in FACT if row.get(name)}
        stated |= {"head_dim": row["head_dim"] or "none", "heads": "1", "checkpoint": "none"}
        notes = (f"ref. {row['label']}: {row['caveats']}",) if row["caveats"] else ()
        figure = Cell(_number(row["value"]), _number(row["std"]), text=row["text"], notes=notes)
        rows[row["label"]].insert(0, _Row(stated, {row["column"]: figure}))
    return rows


def _report(name: str) -> dict[str, list[_Row]]:
    """The rows of a report's CSV file by GPU; raises UsageError as `reference_feature` does."""
    shipped = {path.stem: path for path in FOLDER.glob("*.csv") if path.with_suffix(".md").is_file()}
    if name not in shipped and not name.endswith(".csv"):
        raise unknown("--reference", name, [_PUBLISHED, *shipped], ", or a file of `lmbench report --format csv`")
    advice, rows = "write one with `lmbench report --format csv`", defaultdict[str, list[_Row]](list)
    try:
        text = read_file(shipped.get(name, Path(name)), _MOST_BYTES, follows_links=True).decode(errors="replace")
        reader = csv.DictReader(text.splitlines())
        if not {"gpu", STEP.name} <= {*(reader.fieldnames or ())}:
            raise UsageError(f"--reference {name} is no report's table; {advice}")
        for row in reader:
            stated = {fact: row[fact] for fact in FACT.keys() - _CIRCUMSTANCES if row.get(fact)}
            numbers = {column: _number(row.get(column)) for column in _COMPARED}
            figures = {column: Cell(value) for column, value in numbers.items() if value is not None}
            if STEP.name in figures:
                figures[STEP.name] = Cell(numbers[STEP.name], _number(row.get("step_std_s")))
            # Rows of other commands' answers state no configuration.
            if stated and figures:
                rows[row["gpu"] or "no GPU named"].append(_Row(stated, figures))
    except Unreadable as error:
        raise UsageError(f"--reference {name}: {error}") from None
    except csv.Error as error:
        raise UsageError(f"--reference {name}: {error}; {advice}") from None
    if len(rows) > _MOST_GPUS:
        raise UsageError(f"--reference {name} has {len(rows):,} GPUs; give the rows of at most {_MOST_GPUS}")
    return rows


def _number(text: str | None) -> float | None:
    """The number in a field; None where there is none, or none that was measured."""
    with suppress(ValueError):
        number = float(text or "")
        return number if 0 <= number <= _LARGEST else None
    return None
