"""Which of several ways is the fastest, for each set of the other facts: the verdict, and a table of verdicts.

One process is one sample: the fastest is told from each other one by Welch's t on the logarithms of process means
(design section 8). It is the smallest of several means, and rows are many: the 95 % interval is that of one pair.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from lmbench.records.statistics import ratio_of
from lmbench.report.cells import Cell, in_order, in_short, outcome_word
from lmbench.report.columns import Column, host_bound, numbers
from lmbench.report.table import Entry, Heading, Table, fact
from lmbench.report.units import MISSING, change_percent, change_range

#: Processes a side from which on a difference is judged.
_ENOUGH = 3
#: A ratio whose 90 % interval lies within this is no difference, as `lmbench compare` has it by default.
_TOLERANCE_FRACTION = 0.01
UNDECIDED, SAME = "undecided", "same"
_NOTES = {
    UNDECIDED: "undecided: the 95 % interval of the ratio between processes includes 1, or a side has fewer than three",
    SAME: "same: the 90 % intervals of their ratios lie within 1 %",
}
_HOST_BOUND = "the device waited for the host in most of the fastest's step: it is the host's time that is compared"
_PAIRS = "each interval is that of one pair, not corrected for the number of rows"


@dataclass(frozen=True)
class _Way:
    """One of the ways: its name, a value of each of its processes in SI, and whether its step waits for the host."""

    name: str
    values: list[float]
    is_host_bound: bool

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    def verdict(self, other: _Way) -> str:
        """Whether this one is told from a slower one: `undecided`, `same`, or empty where it is faster."""
        if min(len(self.values), len(other.values)) < _ENOUGH:
            return UNDECIDED
        ratio = ratio_of(self.values, other.values)
        return SAME if ratio.lies_within(_TOLERANCE_FRACTION) else "" if ratio.excludes_one else UNDECIDED


@dataclass(frozen=True)
class Verdict:
    """The fastest of several ways, and how sure that is.

    `word` is empty where it is told from all others, else `undecided` or `same`; `untold` are those that it is not told
    from. Of the second the mean in SI is there; `low` and `high` are the ends of the 95 % interval of its ratio.
    """

    fastest: str
    mean: float
    is_host_bound: bool
    word: str = ""
    untold: tuple[str, ...] = ()
    second: str | None = None
    second_mean: float = 0.0
    low: float | None = None
    high: float | None = None

    @property
    def second_takes(self) -> str:
        """How much more the second takes, by the means: `+12.28 %`."""
        return change_percent(self.second_mean / self.mean - 1)


def verdict_among(cells: Sequence[Cell], among: Sequence[str], column: Column) -> Verdict | None:
    """Judge cells that differ in the facts `among` alone, by a time that each process has one value of; None where none
    has it."""
    assert column.of_run is not None
    found = [_Way(in_short(cell, among), numbers(cell, column.of_run), _is_host_bound(cell)) for cell in cells]
    ways = sorted((way for way in found if way.values and min(way.values) > 0), key=lambda way: way.mean)
    if not ways:
        return None
    first, *others = ways
    if not others:
        return Verdict(first.name, first.mean, first.is_host_bound)
    untold = {way.name: word for way in others if (word := first.verdict(way))}
    word = UNDECIDED if UNDECIDED in untold.values() else SAME if untold else ""
    second, ratio = others[0], ratio_of(first.values, others[0].values)
    return Verdict(
        first.name,
        first.mean,
        first.is_host_bound,
        word,
        tuple(untold),
        second.name,
        second.mean,
        ratio.low,
        ratio.high,
    )


def fastest_table(
    title: str, caption: str, cells: Sequence[Cell], rows: Sequence[str], among: Sequence[str], column: Column,
    fact_headings: Sequence[Heading],
) -> Table:  # fmt: skip
    """A row for each combination of the facts `rows`: the fastest of `among`, the next one, and how sure that is.

    Args:
        cells: of one device, with no other differences than `rows` and `among`.
        column: a time that each process has one value of.
        fact_headings: those of `rows`.
    """
    headings = [*fact_headings, Heading("fastest", is_number=False), Heading(column.heading)]
    headings += [Heading("second", is_number=False), Heading("second takes"), Heading("95 % interval")]
    headings.append(Heading("no figure", is_number=False))
    table = Table(title, caption, headings, [])
    for _, group in groupby(in_order(cells, [*rows, *among]), key=lambda cell: [cell.facts.get(name) for name in rows]):
        same = list(group)
        shape = [_fact(same[0], name) for name in rows]
        table.rows.append([*shape, *_entries(verdict_among(same, among, column), column, table), _missing(same, among)])
    if all(row[-1].kind == "missing" for row in table.rows):
        table.headings.pop()
        for row in table.rows:
            row.pop()
    if any(row[len(rows) + 4].kind == "number" for row in table.rows):
        table.note(_PAIRS)
    return table


def _entries(verdict: Verdict | None, column: Column, table: Table) -> list[Entry]:
    """The fastest, its time, the second, how much more that takes by the means, and the interval of that."""
    missing = Entry(MISSING, "missing")
    if verdict is None:
        return [missing] * 5
    told = [_NOTES[verdict.word]] if verdict.word else []
    told += [_HOST_BOUND] if verdict.is_host_bound else []
    names = ", ".join([verdict.fastest, *verdict.untold])
    name = f"{verdict.word}: {names}" if verdict.word else verdict.fastest
    shown = [Entry(name, "fact", tuple(map(table.note, told))), Entry(column.unit.text(verdict.mean))]
    if verdict.second is None:
        return [*shown, missing, missing, missing]
    interval = missing
    if verdict.low is not None and verdict.high is not None:
        interval = Entry(change_range(verdict.low - 1, verdict.high - 1))
    return [*shown, fact(verdict.second), Entry(verdict.second_takes), interval]


def _is_host_bound(cell: Cell) -> bool:
    share = host_bound(cell)
    return share is not None and share.value > 0.5


def _fact(cell: Cell, name: str) -> Entry:
    value = cell.facts.get(name)
    return Entry(MISSING, "missing") if value is None else fact(str(value))


def _missing(cells: Sequence[Cell], among: Sequence[str]) -> Entry:
    """The ways that gave no figure, by how they ended."""
    bad: dict[str, list[str]] = {}
    for cell in cells:
        if not cell.ok:
            bad.setdefault(outcome_word(cell.outcome), []).append(in_short(cell, among))
    text = "; ".join(f"{word}: {', '.join(names)}" for word, names in bad.items())
    return Entry(text, "outcome") if bad else Entry(MISSING, "missing")
