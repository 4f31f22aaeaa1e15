"""What published figures add to a report: columns beside those that they can be compared with, source by source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from lmbench.reference import Figure, load_rows
from lmbench.report.answer import Cell
from lmbench.report.columns import STEP, Column
from lmbench.report.facts import EAGER, Value
from lmbench.report.frame import Frame
from lmbench.report.view import Feature

#: Of two for one cell the later one states more.
_FIGURES = load_rows("figures.csv", Figure)


def _published(frame: Frame, cell: int, label: str, column: str) -> Cell | None:
    """A source's figure that a cell can be compared with.

    What a write-up states must be equal, and the cell must be as the figure is: eager or compiled, with attention
    written out, nothing recomputed. What it does not state is a caveat; a figure of unknown size or context stands
    beside a cell only where all cells have one.
    """
    several = [name for name in ("size", "context") if len(frame.values.get(name, ())) > 1]
    found = None
    for figure in _FIGURES:
        is_asked = (figure.label, figure.column) == (label, column)
        is_told = all(getattr(figure, name) is not None for name in several)
        if is_asked and is_told and _fits(figure, frame.known[cell]):
            notes = (f"ref. {label}: {figure.caveats}",) if figure.caveats else ()
            found = Cell(figure.value, figure.std, text=figure.text, notes=notes)
    return found


def _fits(figure: Figure, facts: Mapping[str, Value]) -> bool:
    # Attention by itself was published of one head.
    known = {"attention": "naive", "heads": 1, "checkpoint": "none", "compile": EAGER, "head_dim": None, **facts}
    exact = (known.get("precision"), known["head_dim"], known["compile"] != EAGER, known["checkpoint"], known["heads"])
    stated = ("size", "mode", "batch", "context", "matmul", "warmup", "attention")
    return exact == (figure.precision, figure.head_dim, figure.is_compiled, "none", 1) and all(
        getattr(figure, name) in (None, known.get(name)) for name in stated
    )


def _beside(column: Column) -> Iterator[Column]:
    for label in sorted({figure.label for figure in _FIGURES if figure.column == column.name}):
        title = f"ref. {label}" + (f": {column.title}" if column is not STEP else "")
        read = partial(_published, label=label, column=column.name)
        yield Column(f"reference {label}: {column.name}", title, read, column.unit, None)


REFERENCE = Feature(beside=_beside)
