"""The sentences that answer a view's question.

They are about the cells that decide: usually the largest ones, by the order in which tables sort them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from lmbench.records.vocabulary import GATE_FRACTION
from lmbench.report.answer import listed, text_of
from lmbench.report.columns import BASELINE, CHANGE
from lmbench.report.fastest import TOO_FEW, fastest_rows, rivals_of
from lmbench.report.frame import Frame, MeasuredCell
from lmbench.report.units import TIMES
from lmbench.report.view import AnswerSpec, ColumnOf

#: Most parts that are named, and most cells that have a sentence.
_MOST_PARTS, _MOST_CELLS = 3, 6
#: The figures of `y` by cell, and a sentence's statement on a cell with the facts that tell where that is.
_Measured = Mapping[MeasuredCell, Any]
_Statements = Iterator[tuple[str, MeasuredCell, Sequence[str]]]


def sentences(specs: Sequence[AnswerSpec], frame: Frame, column_of: ColumnOf) -> list[str]:
    """The sentences by which cells answer: `In small, TF32 is 4.50x as fast as fp32 eager: step 72.91 ± 0.12 ms.`"""
    makers = {"against": _against, "best": _best, "parts": _parts}
    texts = list[str]()
    for spec in specs:
        figures = {quantity: quantity.of(frame) for quantity in map(column_of, (spec.y, *spec.also))}
        if spec.kind == "fastest":
            texts += _fastest_ways(spec, frame, column_of)
            continue
        for statement, cell, others in makers[spec.kind](spec, frame, column_of, figures[column_of(spec.y)]):
            place, stated = cell.describe(others), list[str]()
            for quantity, cells in figures.items():
                if cell in cells:
                    title = quantity.column(frame).title
                    if quantity.unit is CHANGE:
                        title = f"{quantity.title.removesuffix(f' vs {BASELINE}')} changed by"
                    stated.append(f"{title} {quantity.text(cells[cell])}")
            texts.append(f"{f'In {place}, ' if place else ''}{statement}: {', '.join(stated)}.")
    return texts


def _against(spec: AnswerSpec, frame: Frame, column_of: ColumnOf, measured: _Measured) -> _Statements:
    """How fast each way is compared with the baseline, for the largest cell that both have."""
    speedups, others = column_of("speedup").of(frame), frame.differing(frame.baseline)
    comparable = {cell for cell, base in frame.compared if {cell, base} <= measured.keys()}
    for cell in _largest(frame, others, comparable):
        if (speedup := speedups.get(cell)) is not None:
            way = cell.describe(frame.differing(others))
            interval = (
                speedup.p is not None and f"95 % interval {TIMES.text(speedup.low)} .. {TIMES.text(speedup.high)}"
            )
            certainty = listed(*speedup.notes, interval, separator="; ")
            yield f"{way} is {text_of(speedup, TIMES)} as fast as {frame.base_name} ({certainty})", cell, others


def _best(spec: AnswerSpec, frame: Frame, column_of: ColumnOf, measured: _Measured) -> _Statements:
    """The value of `x` with the largest `y`, for each combination of the other facts, and those that may be as good."""
    others, quantity = frame.differing((spec.x,)), column_of(spec.y)
    for part in list(frame.by(others))[-_MOST_CELLS:]:
        if cells := [cell for cell in part.cells if cell in measured]:
            best = max(cells, key=lambda cell: measured[cell].value)
            doubt = ""
            if quantity.is_process_mean and len(cells) > 1:
                rivals = rivals_of(best, {cell: cell.numbers(quantity.expression) for cell in cells}, len(cells) - 1)
                if rivals is None:
                    doubt = f" ({TOO_FEW})"
                elif rivals:
                    doubt = f", undecided against {listed(*(cell.describe([spec.x]) for cell in rivals))}"
            yield f"{best.describe([spec.x])} is the best{doubt}", best, others


def _parts(spec: AnswerSpec, frame: Frame, column_of: ColumnOf, measured: _Measured) -> _Statements:
    """The largest cell, with the largest of the quantities that make up its `y`, those below 1 % left out."""
    parts = {part: part.of(frame) for part in map(column_of, spec.of)}
    others = frame.differing()
    for cell in _largest(frame, others, measured):
        sizes = {part: cells[cell].value for part, cells in parts.items() if cell in cells and cells[cell].value}
        notable = [part for part in sizes if sizes[part] >= GATE_FRACTION * sum(sizes.values())]
        largest = sorted(notable, key=sizes.__getitem__, reverse=True)[:_MOST_PARTS]
        mostly = ", ".join(f"{part.title} {part.text(parts[part][cell])}" for part in largest)
        statement = f"{column_of(spec.y).title} is mostly {mostly}" if mostly else "the largest cell has"
        yield statement, cell, others


def _fastest_ways(spec: AnswerSpec, frame: Frame, column_of: ColumnOf) -> Iterator[str]:
    """For each way the number of shapes in which it is the fastest."""
    quantity = column_of(spec.y)
    _, rows = fastest_rows(frame, frame.differing(spec.among), spec.among, quantity)
    wins = Counter(first.value for _, (first, _, second, *_) in rows if first and second)
    if wins:
        for name, count in wins.most_common():
            yield f"In {count} of {wins.total()} the fastest by {quantity.title} is {name}."


def _largest(frame: Frame, others: Sequence[str], measured: Container[MeasuredCell]) -> list[MeasuredCell]:
    """The largest measured cell of each way, by the order in which tables sort the facts `others`; the ways differ in
    the rest of the facts."""
    parts = frame.by(frame.differing(others))
    groups = [[cell for cell in part.ordered(others) if cell in measured] for part in parts]
    return [group[-1] for group in groups if group]
