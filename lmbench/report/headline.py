"""The answer to a view's question: the cells that decide it, each with the figures that the view names.

They are the largest cells that can tell, by the order in which tables sort them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lmbench.report.columns import Column
from lmbench.report.facts import sort_key
from lmbench.report.frame import Frame
from lmbench.report.tables import fastest
from lmbench.report.units import TIMES
from lmbench.report.view import AnswerSpec, ColumnOf

#: Shares that are named, and cells that have a clause of their own.
_NAMED, _CLAUSES = 3, 6


def sentences(specs: Sequence[AnswerSpec], frame: Frame, column_of: ColumnOf) -> list[str]:
    """A sentence for each spec that the cells have an answer to: `small, TF32: speed-up vs fp32 eager 4.50x, step 72.91
    ± 0.12 ms; ...`."""
    texts = []
    for spec in specs:
        columns = [column_of(name) for name in (*(["speedup"] if spec.kind == "against" else []), spec.y, *spec.also)]
        column = column_of(spec.y)
        if spec.kind == "fastest":
            clauses = _fastest(spec, frame, column)
        else:
            figures = {column: column.of(frame) for column in columns}
            values = {cell: figure.value for cell, figure in figures[column].items() if figure.value is not None}
            cells = _deciding(spec, frame, values)
            if spec.kind == "parts" and cells:
                parts = {part: part.of(frame) for part in map(column_of, spec.of)}
                sizes = {part: of[cells[0]].value for part, of in parts.items() if cells[0] in of}
                largest = sorted(filter(sizes.get, sizes), key=sizes.__getitem__, reverse=True)[:_NAMED]
                figures |= {part: parts[part] for part in largest}
            clauses = [f"{frame.in_words(cell, frame.differing())}: {_told(cell, frame, figures)}" for cell in cells]
        texts += [f"{'; '.join(clauses)}."] if clauses else []
    return texts


def _deciding(spec: AnswerSpec, frame: Frame, values: Mapping[int, Any]) -> list[int]:
    """The cells that decide: of each way but the baseline the largest; the largest of all; of each group the best; or
    the ends of the group that goes furthest along `x`."""
    compared = frame.baseline if spec.kind == "against" else (spec.x,)
    ways = [name for name in frame.differing() if name in compared]
    others = [name for name in frame.differing() if name not in compared]
    if spec.kind in ("against", "parts"):
        comparable = {cell for cell, base in frame.base.items() if cell != base and {cell, base} <= values.keys()}
        cells = comparable if spec.kind == "against" else values
        groups = [[cell for cell in part.ordered(others) if cell in cells] for part in frame.by(ways)]
        return [group[-1] for group in groups if group]
    groups = [[cell for cell in part.ordered(ways) if cell in values] for part in frame.by(others)]
    if spec.kind == "best":
        return [max(group, key=values.__getitem__) for group in groups if group][-_CLAUSES:]
    several = [group for group in groups if group[1:]]
    several.sort(key=lambda group: sort_key(spec.x, frame.known[group[-1]].get(spec.x)))
    return [cell for group in several[-1:] for cell in (group[0], group[-1])]


def _told(cell: int, frame: Frame, figures: Mapping[Column, Mapping[int, Any]]) -> str:
    """The cell's figures. A speed-up says what keeps it from being a verdict: a single process a side, or an interval
    that includes 1."""
    texts = []
    for column, cells in figures.items():
        if (figure := cells.get(cell)) is not None:
            texts.append(f"{column.heading(frame).title} {column.text(figure)} {column.unit.word}".rstrip())
            if column.is_relative and column.unit is TIMES and figure.low is None:
                texts[-1] += " (not decided: one process each; --repeats 3)"
            elif column.is_relative and column.unit is TIMES and figure.low <= 1 <= figure.high:
                texts[-1] += " (undecided)"
    return ", ".join(texts)


def _fastest(spec: AnswerSpec, frame: Frame, column: Column) -> list[str]:
    """Of how many shapes each way is the fastest."""
    rows = [fastest(p, spec.among, column) for p in frame.by([n for n in frame.differing() if n not in spec.among])]
    wins = Counter(row[0].value for row in rows if row and row[0] and row[2])
    return [f"fastest by {column.title}: {name} in {count} of {wins.total()}" for name, count in wins.most_common()]
