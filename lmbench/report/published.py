"""What published figures add to a report: columns beside those that they can be compared with, source by source."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lmbench.reference import Figure, load_rows
from lmbench.report.answer import Cell
from lmbench.report.columns import STEP, Column
from lmbench.report.facts import EAGER, Value
from lmbench.report.frame import Frame
from lmbench.report.view import Feature

#: Of two for one cell the later one states more.
_FIGURES = load_rows("figures.csv", Figure)
_STATED = ("size", "mode", "batch", "context", "matmul", "warmup", "attention")


def _published(frame: Frame, cell: int, label: str, column: str) -> Cell | None:
    """A source's figure that a cell can be compared with.

    What a write-up states must be equal, and the cell must be as the figure is: eager or compiled, with attention
    written out, nothing recomputed, one head (of attention by itself). What it does not state is a caveat; a figure of
    unknown size or context stands beside a cell only where all cells have one.
    """
    usual: dict[str, Value] = {"attention": "naive", "heads": 1, "checkpoint": "none", "compile": EAGER}
    facts = {**usual, "head_dim": None, **frame.known[cell]}
    alike = (label, column, facts.get("precision"), facts["head_dim"], facts["compile"] != EAGER)
    several = {name for name in ("size", "context") if len(frame.values.get(name, ())) > 1}
    found = None
    for figure in _FIGURES if (facts["checkpoint"], facts["heads"]) == ("none", 1) else ():
        stated = {name: getattr(figure, name) for name in _STATED if getattr(figure, name) is not None}
        is_alike = alike == (figure.label, figure.column, figure.precision, figure.head_dim, figure.is_compiled)
        if is_alike and stated.items() <= facts.items() and several <= stated.keys():
            notes = (f"ref. {label}: {figure.caveats}",) if figure.caveats else ()
            found = Cell(figure.value, figure.std, text=figure.text, notes=notes)
    return found


def _beside(column: Column) -> Iterator[Column]:
    for label in sorted({figure.label for figure in _FIGURES if figure.column == column.name}):
        title = f"ref. {label}" + (f": {column.title}" if column is not STEP else "")
        read = partial(_published, label=label, column=column.name)
        yield Column(f"reference {label}: {column.name}", title, read, column.unit, None)


REFERENCE = Feature(beside=_beside)
