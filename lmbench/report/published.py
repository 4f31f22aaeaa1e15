"""Columns with figures from elsewhere (`--reference`), each beside the report's own column of the same quantity.

The figures are those of five write-ups, or of a report's CSV file: the shipped one of an H200, or a user's.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from lmbench.errors import UsageError, unknown
from lmbench.files import Unreadable, read_file
from lmbench.reference import FOLDER, PublishedFigure, load_rows
from lmbench.report.answer import Cell
from lmbench.report.columns import STEP, Quantity
from lmbench.report.facts import EAGER, FACT, Value
from lmbench.report.frame import Frame
from lmbench.report.view import Feature

_PUBLISHED = "published"
#: Facts that a write-up may state.
_STATED = ("size", "mode", "batch", "context", "matmul", "warmup", "attention")
#: Facts of where, when and how long was measured: a row of another report may differ from a cell in these.
_CIRCUMSTANCES = {"gpu", "warmup", "environment", "torch", "commit", "host"}
#: Columns shown of another report; all of its columns would double each table.
_COMPARED = (STEP.name, "tokens_per_s", "peak_bytes")
_MOST_BYTES = 2**24
#: A table has a column for each GPU.
_MOST_GPUS = 100
#: No time, rate or size of a report is larger.
_LARGEST = 1e15

#: The labels of the sources of a column, and the function that finds a source's figure for a cell by its label.
Sources = tuple[set[str], Callable[[str, Frame, int], Cell | None]]


def reference_feature(name: str) -> Feature:
    """The feature that adds a reference's figures to a report.

    Args:
        name: `published`, `h200`, or a file that `lmbench report --format csv` wrote.

    Raises:
        UsageError: the reference does not exist, or the file was not written by a report.
    """
    if name == _PUBLISHED:
        return _feature(_write_ups)
    shipped = {path.stem: path for path in FOLDER.glob("*.csv") if path.with_suffix(".md").is_file()}
    if name not in shipped and not name.endswith(".csv"):
        raise unknown("--reference", name, [_PUBLISHED, *shipped], ", or a file of `lmbench report --format csv`")
    path = shipped.get(name, Path(name))
    try:
        text = read_file(path, _MOST_BYTES, follows_links=True).decode(errors="replace")
    except Unreadable as error:
        raise UsageError(f"--reference {name}: {error}") from None
    advice = "write one with `lmbench report --format csv`"
    reader = csv.DictReader(text.splitlines())
    rows = defaultdict[str, list[dict[str, str]]](list)
    try:
        if not {"gpu", STEP.name} <= {*(reader.fieldnames or ())}:
            raise UsageError(f"--reference {name} is no report's table; {advice}")
        for row in reader:
            # A row that is too short lacks its last fields.
            rows[row["gpu"] or "no GPU named"].append({field: text for field, text in row.items() if text})
    except csv.Error as error:
        raise UsageError(f"--reference {name}: {error}; {advice}") from None
    if len(rows) > _MOST_GPUS:
        raise UsageError(f"--reference {name} has {len(rows):,} GPUs; give the rows of at most {_MOST_GPUS}")
    return _feature(partial(_report, rows))


def _feature(sources_of: Callable[[str], Sources]) -> Feature:
    """The feature that shows, beside each column, a column for each of its sources."""

    def beside(column: Quantity) -> Iterator[Quantity]:
        labels, find = sources_of(column.name)
        for label in sorted(labels):
            title = f"ref. {label}" + (f": {column.title}" if column is not STEP else "")
            name = f"reference {label}: {column.name}"
            yield Quantity(name, title, partial(find, label), column.unit, None)

    return Feature(beside=beside)


def _report(rows: Mapping[str, list[dict[str, str]]], column: str) -> Sources:
    """The GPUs for which rows of a report have a number in this column; `rows` are by GPU."""
    configuration = FACT.keys() - _CIRCUMSTANCES

    def find(label: str, frame: Frame, cell: int) -> Cell | None:
        facts = {name: str(value) for name, value in frame.facts[cell].items()}
        for row in rows[label]:
            stated = {name: row[name] for name in configuration & row.keys()}
            # Rows of cells without a value, such as those that ran out of memory, have no number; rows of other
            # commands' answers state no configuration.
            if stated and stated.items() <= facts.items() and (value := _number(row.get(column))) is not None:
                return Cell(value, _number(row.get(f"{column.removesuffix('_s')}_std_s")))
        return None

    has_column = column in _COMPARED
    return {label for label, own in rows.items() if has_column and any(column in row for row in own)}, find


def _number(text: str | None) -> float | None:
    """The number in a field; None where there is none, or none that was measured."""
    with suppress(ValueError):
        number = float(text or "")
        return number if 0 <= number <= _LARGEST else None
    return None


def _write_ups(column: str) -> Sources:
    """The write-ups that have a figure for this column.

    A figure matches a cell with the same precision and head_dim, compiled or not, and with all facts that its write-up
    states. The cell must recompute nothing and have one head (in attention by itself). Unstated facts are caveats, but
    if the cells differ in size or context, a figure must state that. Of several matches the last one states most.
    """
    figures = [figure for figure in load_rows("figures.csv", PublishedFigure) if figure.column == column]

    def find(label: str, frame: Frame, cell: int) -> Cell | None:
        usual: dict[str, Value] = {"attention": "naive", "heads": 1, "checkpoint": "none", "compile": EAGER}
        facts = {**usual, "head_dim": None, **frame.facts[cell]}
        required = (label, facts.get("precision"), facts["head_dim"], facts["compile"] != EAGER)
        differing = {name for name in ("size", "context") if len(frame.values.get(name, ())) > 1}
        match = None
        for figure in figures if (facts["checkpoint"], facts["heads"]) == ("none", 1) else ():
            stated = {name: getattr(figure, name) for name in _STATED if getattr(figure, name) is not None}
            is_alike = required == (figure.label, figure.precision, figure.head_dim, figure.is_compiled)
            if is_alike and stated.items() <= facts.items() and differing <= stated.keys():
                notes = (f"ref. {label}: {figure.caveats}",) if figure.caveats else ()
                match = Cell(figure.value, figure.std, text=figure.text, notes=notes)
        return match

    return {figure.label for figure in figures}, find
