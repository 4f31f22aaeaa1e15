"""Columns with figures from elsewhere (`--reference`), each beside the report's own column of the same quantity.

The figures are those of five write-ups, or of a report's CSV file: the shipped one of an H200, or a user's.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lmbench.errors import UsageError, unknown
from lmbench.files import Unreadable, read_file
from lmbench.reference import FOLDER
from lmbench.report.answer import Cell
from lmbench.report.columns import KNOWN_BY, STEP, Quantity
from lmbench.report.facts import EAGER, ENVIRONMENT, FACT
from lmbench.report.frame import Frame, MeasuredCell
from lmbench.report.view import Feature

_PUBLISHED = "published"
#: Facts of where, when and how long was measured: a row of another report may differ from a cell in these.
_CIRCUMSTANCES = {"gpu", "warmup", "environment", *ENVIRONMENT}
#: The facts of a cell that does not state them.
_USUAL = {
    "attention": "naive", "heads": 1, "checkpoint": "none", "compile": EAGER, "head_dim": "none"
}  # fmt: skip
_MOST_BYTES = 2**24
#: No time, rate or size of a report is larger.
_LARGEST = 1e15


class _Figure(NamedTuple):
    """Somebody else's figure: its write-up or GPU, its column, its configuration by the facts stated, as text, and the
    number of processes that it is the mean of."""

    label: str
    column: str
    stated: Mapping[str, str]
    cell: Cell
    processes: float = 1.0


def reference_feature(name: str) -> Feature:
    """The feature that shows a reference's figures beside each column, in a column for each GPU or write-up.

    Args:
        name: `published`, `h200` (all pages of that card), or a file that `lmbench report --format csv` wrote.

    Raises:
        UsageError: the reference does not exist, or the file was not written by a report.
    """
    figures = _write_ups() if name == _PUBLISHED else _report(name)

    def beside(column: Quantity) -> Iterator[Quantity]:
        of_column = [figure for figure in figures if figure.column == column.name]
        for label in sorted({figure.label for figure in of_column}):
            title = f"ref. {label}" + (f": {column.title}" if column is not STEP else "")
            cell_of = partial(_comparable, [figure for figure in of_column if figure.label == label])
            yield Quantity(f"reference {label}: {column.name}", title, cell_of, column.unit, None)

    return Feature(beside=beside)


def _comparable(figures: Sequence[_Figure], frame: Frame, cell: MeasuredCell) -> Cell | None:
    """The first figure of which the cell has every stated fact.

    If the cells differ in size or context, a figure must state that.
    """
    facts = {name: str(value) for name, value in {**_USUAL, **cell.facts}.items()}
    differing = {name for name in ("size", "context") if len(frame.values.get(name, ())) > 1}
    for figure in figures:
        if figure.stated.items() <= facts.items() and differing <= figure.stated.keys():
            return figure.cell
    return None


def _write_ups() -> list[_Figure]:
    """The figures of each write-up, those that state most first.

    What a write-up does not state is a caveat, but it recomputes nothing, and has one head in attention by itself.
    """
    figures = []
    for row in csv.DictReader((FOLDER / "figures.csv").read_text("utf-8").splitlines()):
        stated = {name: row[name] for name in FACT if row.get(name)}
        stated |= {"head_dim": row["head_dim"] or "none", "heads": "1", "checkpoint": "none"}
        notes = (f"ref. {row['label']}: {row['caveats']}",) if row["caveats"] else ()
        cell = Cell(_number(row["value"]), _number(row["std"]), text=row["text"], notes=notes)
        figures.append(_Figure(row["label"], row["column"], stated, cell))
    return figures[::-1]


def _report(name: str) -> list[_Figure]:
    """The figures of a report, labelled with their GPUs, those of most processes first.

    Raises UsageError as `reference_feature` does.
    """
    shipped = sorted(path for path in FOLDER.glob("*.csv") if path.with_suffix(".md").is_file())
    # A card's name stands for all of its pages.
    paths = [path for path in shipped if name in (path.stem, path.stem.partition("_")[0])]
    if not paths and not name.endswith(".csv"):
        known = [_PUBLISHED, *(path.stem for path in shipped)]
        raise unknown("--reference", name, known, ", or a file of `lmbench report --format csv`")
    figures = [figure for path in paths or [Path(name)] for figure in _figures_of(path, name)]
    return sorted(figures, key=lambda figure: -figure.processes)


def _figures_of(path: Path, name: str) -> Iterator[_Figure]:
    """The figures of one file of a reference."""
    advice = "write one with `lmbench report --format csv`"
    try:
        text = read_file(path, _MOST_BYTES, follows_links=True).decode(errors="replace")
        reader = csv.DictReader(text.splitlines())
        if not {"gpu", STEP.name} <= {*(reader.fieldnames or ())}:
            if path.parent == FOLDER:
                # A page of answers alone, such as that of `lmbench overhead`.
                return
            raise UsageError(f"--reference {name} is no report's table; {advice}")
        for row in reader:
            if path.parent == FOLDER and row.get("tail_loss"):
                # The trainings of our study of convergence also take the norm of their gradients.
                continue
            stated = {fact: row[fact] for fact in FACT.keys() - _CIRCUMSTANCES if row.get(fact)}
            # Rows of other commands' answers state no configuration. All columns would double each table.
            for column in KNOWN_BY if stated else ():
                if (value := _number(row.get(column))) is not None:
                    std = _number(row.get("step_std_s")) if column == STEP.name else None
                    processes = _number(row.get("ok_runs")) or 1.0
                    yield _Figure(row["gpu"] or "no GPU named", column, stated, Cell(value, std), processes)
    except Unreadable as error:
        raise UsageError(f"--reference {name}: {error}") from None
    except csv.Error as error:
        raise UsageError(f"--reference {name}: {error}; {advice}") from None


def _number(text: str | None) -> float | None:
    """The number in a field; None where there is none, or none that was measured."""
    with suppress(ValueError):
        number = float(text or "")
        return number if 0 <= number <= _LARGEST else None
    return None
