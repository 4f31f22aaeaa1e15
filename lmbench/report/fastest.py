"""The fastest of several ways, and how certain that is: the rows of a table with `among`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from lmbench.records.statistics import have_logs, ratio_of
from lmbench.records.vocabulary import GATE_FRACTION, MIN_REPEATS
from lmbench.report.answer import Cell, Column
from lmbench.report.columns import Quantity
from lmbench.report.frame import Frame, MeasuredCell
from lmbench.report.units import Unit, change_percent, change_range

#: The rows of a table: each a cell of the frame with its figures, the facts left out.
Rows = list[tuple[MeasuredCell, list[Cell | None]]]
_CHANGE = Unit(change_percent, scale=100.0)
_VERDICT_NOTES = {
    "undecided": "undecided: the ratio between processes may be 1 (5 % over all rows)",
    "same": "same: the 90 % intervals of their ratios lie within 1 %",
}
TOO_FEW = f"undecided: fewer than {MIN_REPEATS} processes"


def fastest_rows(
    frame: Frame, names: Sequence[str], among: Sequence[str], quantity: Quantity
) -> tuple[list[Column], Rows]:
    """A row for each combination of the row facts: the fastest way, the second, and how certain the difference is."""
    headings = [
        Column("fastest"), quantity.column(frame), Column("second"),
        Column("second takes", _CHANGE), Column("95 % interval", _CHANGE),
    ]  # fmt: skip
    parts = [*frame.by(names)]
    return headings, [(part.cells[0], fastest(part, among, quantity, len(parts))) for part in parts]


def fastest(frame: Frame, among: Sequence[str], quantity: Quantity, row_count: int) -> list[Cell | None]:
    """Judge which of the cells, which differ in the facts `among` alone, takes the least time.

    One process is one sample. Welch's t on the logarithms of process means compares the fastest cell with each other
    one, at 5 % over all rows (Bonferroni). The 95 % interval is that of one pair. It allows neither for the choice of
    the smallest of several means nor for the number of rows.

    Returns:
        Five cells: the fastest, its time in s, the second, the further time of the second as a fraction, and the
        interval of this fraction. The first cell says `same` or `undecided` with all ways that may be as fast, or has a
        note that there are too few processes to tell. Cells without a value are None.
    """
    samples = {cell: cell.numbers(quantity.expression) for cell in frame.cells}
    samples = {cell: numbers for cell, numbers in samples.items() if have_logs(numbers)}
    ways = sorted(samples, key=lambda cell: fmean(samples[cell]))
    if not ways:
        return [None] * 5
    first, *others = ways
    name, time_s = first.describe(among), fmean(samples[first])
    if not others:
        return [Cell(name), Cell(time_s), None, None, None]
    rivals = rivals_of(first, samples, row_count)
    if rivals is None:
        verdict = Cell(f"{name} ({TOO_FEW})", text=name, notes=(TOO_FEW,))
    elif rivals:
        word = "undecided" if "undecided" in rivals.values() else "same"
        names = [cell.describe(among) for cell in ways if cell in rivals]
        verdict = Cell(f"{word}: {'; '.join([name, *names])}", notes=(_VERDICT_NOTES[word],))
    else:
        verdict = Cell(name)
    second, interval = others[0], None
    ratio = ratio_of(samples[first], samples[second])
    if ratio.low is not None and ratio.high is not None:
        low, high = ratio.low - 1, ratio.high - 1
        interval = Cell(None, low=low, high=high, text=change_range(low, high))
    further = fmean(samples[second]) / time_s - 1
    return [verdict, Cell(time_s), Cell(second.describe(among)), Cell(further), interval]


def rivals_of(
    best: MeasuredCell, samples: Mapping[MeasuredCell, Sequence[float]], row_count: int
) -> dict[MeasuredCell, str] | None:
    """The cells that may be as good as the best one, each with `same` or `undecided`; None with too few processes.

    Welch's t compares the best cell with each other one, at 5 % over all rows (Bonferroni). Samples that are not
    positive and finite are not tested.
    """
    if min(map(len, samples.values())) < MIN_REPEATS:
        return None
    if not all(map(have_logs, samples.values())):
        return {}
    verdicts = {
        cell: ratio_of(samples[best], numbers).verdict(GATE_FRACTION, row_count)
        for cell, numbers in samples.items()
        if cell != best
    }
    return {cell: verdict for cell, verdict in verdicts.items() if verdict in _VERDICT_NOTES}
