"""What other measurements add to a report: columns beside those that they can be compared with, source by source.

They are the figures of five write-ups, or those of a report's CSV: the one of an H200 that lmbench ships, or anybody's.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from lmbench.errors import UsageError, unknown
from lmbench.files import Unreadable, read_file
from lmbench.reference import FOLDER, Figure, load_rows
from lmbench.report.answer import Cell
from lmbench.report.columns import STEP, Column
from lmbench.report.facts import EAGER, FACT, Value
from lmbench.report.frame import Frame
from lmbench.report.view import Feature

_PUBLISHED = "published"
_STATED = ("size", "mode", "batch", "context", "matmul", "warmup", "attention")
#: Where, when and how long was measured: a row of a report is compared with cells that differ in these.
_CIRCUMSTANCES = {"gpu", "warmup", "environment", "torch", "commit", "host"}
#: What of a report stands beside another's; all of its columns would double each table.
_COMPARED = (STEP.name, "tokens_per_s", "peak_bytes")
_MOST_BYTES = 2**24

#: The figure of a source that a cell can be compared with.
Find = Callable[[Frame, int], Cell | None]


def reference(name: str) -> Feature:
    """The feature that puts figures beside a report's own.

    Args:
        name: `published`, `h200`, or a file that `lmbench report --format csv` wrote.

    Raises:
        UsageError: there is no such reference, or the file is no report's.
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
    rows = list(csv.DictReader(text.splitlines()))
    if not rows or not {"gpu", STEP.name} <= rows[0].keys():
        raise UsageError(f"--reference {name} is no report's table; write one with `lmbench report --format csv`")
    return _feature(partial(_report, rows))


def _feature(sources: Callable[[str], Iterable[tuple[str, Find]]]) -> Feature:
    def beside(column: Column) -> Iterator[Column]:
        for label, find in sources(column.name):
            title = f"ref. {label}" + (f": {column.title}" if column is not STEP else "")
            yield Column(f"reference {label}: {column.name}", title, find, column.unit, None)

    return Feature(beside=beside)


def _report(rows: list[dict[str, str]], column: str) -> Iterator[tuple[str, Find]]:
    """The GPUs that rows of a report have a number for, with how a cell finds its own."""

    configuration = FACT.keys() - _CIRCUMSTANCES
    facts = [{name: row[name] for name in configuration if row.get(name)} for row in rows]

    def find(frame: Frame, cell: int, label: str) -> Cell | None:
        known = {name: str(value) for name, value in frame.known[cell].items()}
        for row, stated in zip(rows, facts, strict=True):
            if row["gpu"] == label and stated.items() <= known.items():
                # What is no number stands for itself, such as the outcome of a cell that ran out of memory.
                with suppress(ValueError, KeyError):
                    std = row.get(f"{column.removesuffix('_s')}_std_s")
                    return Cell(float(row[column]), float(std) if std else None)
        return None

    for label in sorted({row["gpu"] for row in rows if column in _COMPARED and row.get(column)}):
        yield label, partial(find, label=label)


def _write_ups(column: str) -> Iterator[tuple[str, Find]]:
    """The write-ups that state a figure of this column.

    What one states must be equal, and the cell must be as the figure is: eager or compiled, with attention written out,
    nothing recomputed, one head (of attention by itself). What it does not state is a caveat; a figure of unknown size
    or context stands beside a cell only where all cells have one. Of two for one cell the later one states more.
    """
    figures = [figure for figure in load_rows("figures.csv", Figure) if figure.column == column]

    def find(frame: Frame, cell: int, label: str) -> Cell | None:
        usual: dict[str, Value] = {"attention": "naive", "heads": 1, "checkpoint": "none", "compile": EAGER}
        facts = {**usual, "head_dim": None, **frame.known[cell]}
        alike = (label, facts.get("precision"), facts["head_dim"], facts["compile"] != EAGER)
        several = {name for name in ("size", "context") if len(frame.values.get(name, ())) > 1}
        found = None
        for figure in figures if (facts["checkpoint"], facts["heads"]) == ("none", 1) else ():
            stated = {name: getattr(figure, name) for name in _STATED if getattr(figure, name) is not None}
            is_alike = alike == (figure.label, figure.precision, figure.head_dim, figure.is_compiled)
            if is_alike and stated.items() <= facts.items() and several <= stated.keys():
                notes = (f"ref. {label}: {figure.caveats}",) if figure.caveats else ()
                found = Cell(figure.value, figure.std, text=figure.text, notes=notes)
        return found

    for label in sorted({figure.label for figure in figures}):
        yield label, partial(find, label=label)
