"""What a command works out, before it has a format: a headline, tables of raw values, charts and notes.

A room returns an `Answer`; `lmbench.report.render` makes every format of it. Rows hold SI values (seconds, bytes,
fractions), words or None, and the column's unit says how a number is shown. So the terminal, Markdown, LaTeX and the
page show the same figures that CSV and JSON hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lmbench.masking import shown
from lmbench.records.measured import Guard
from lmbench.report.units import MISSING, MS, WORDS, Unit, mean_and_std

Value = float | int | str | bool | None
#: A Vega-Lite specification.
Spec = Mapping[str, Any]


class Line(NamedTuple):
    """A labelled line; without a label it goes on with what the line before is about.

    With `is_whole` the text is never folded, since it is there to be copied (a path, a command).
    """

    label: str
    text: str
    is_whole: bool = False


def guard_lines(guards: Iterable[Guard], whose: str = "") -> list[Line]:
    """What the guards that did not pass say, failures first, each with its advice; `whose` stands before each."""
    told = list[Line]()
    for guard in sorted(guards, key=lambda guard: guard.status != "fail"):
        if guard.status in ("warn", "fail"):
            told.append(Line(guard.status.upper(), f"{whose}{guard.message}"))
            told += [Line("", guard.advice)] if guard.advice else []
    return told


BLANK = Line("", "")
_UNIT_AT_END = re.compile("(_s|_bytes|_fraction|_flops)?$")


@dataclass(frozen=True)
class Column:
    """A column of a table. `name` is its key in CSV and JSON and ends in the SI unit of its numbers (`forward_s`).

    Where the screen is too narrow for the table, columns that are `is_extra` are the first to be left out, those that
    are `is_shortened` keep the beginning and end of their texts (generated names), and other words go on in the
    next line.
    """

    title: str
    unit: Unit = WORDS
    name: str = ""
    is_shortened: bool = False
    is_extra: bool = False

    @property
    def is_number(self) -> bool:
        return self.unit is not WORDS

    @property
    def heading(self) -> str:
        """The title with its unit."""
        return shown(f"{self.title} ({self.unit.word})" if self.unit.word else self.title)

    def padded(self, text: str, width: int) -> str:
        """A cell's text in the width of its column, numbers on the right."""
        return text.rjust(width) if self.is_number else text.ljust(width)

    @property
    def key(self) -> str:
        return self.name or re.sub(r"\W+", "_", self.title).strip("_")


@dataclass(frozen=True)
class Cell:
    """A value with more than itself: its standard deviation, its interval, other words for it, notes about it.

    `text` is shown instead of the value where the unit cannot say it (`OOM (forward)`). `style` is what a
    page colours, such as `outcome`; `run_id` is the run that it leads to there.
    """

    value: Value
    std: float | None = None
    low: float | None = None
    high: float | None = None
    text: str = ""
    notes: tuple[str, ...] = ()
    style: str = ""
    run_id: str = ""


@dataclass(frozen=True)
class Table:
    """A table. `name` is what `--table` calls it; the caption names the device, what all rows share and which spread is
    shown; with `has_total` the last row is what the others sum up to."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value | Cell]]
    caption: str = ""
    has_total: bool = False

    @property
    def cells(self) -> list[list[Cell]]:
        """All rows, each value a cell."""
        return [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows]

    @property
    def notes(self) -> list[str]:
        """The notes of all cells, each once, in the order in which a reader meets them."""
        return list(dict.fromkeys(shown(note) for row in self.cells for cell in row for note in cell.notes))

    def without_empty_columns(self) -> Table:
        """The table without the columns in which no row has anything."""
        kept = [place for place in range(len(self.columns)) if any(row[place] not in (None, "") for row in self.rows)]
        columns, rows = [self.columns[place] for place in kept], [[row[place] for place in kept] for row in self.rows]
        return replace(self, columns=columns, rows=rows)

    def texts(self) -> list[list[str]]:
        """All rows as they are read, with the numbers of notes."""
        numbers = {note: f" [{number}]" for number, note in enumerate(self.notes, start=1)}
        return [
            [
                text_of(cell, column.unit) + "".join(numbers[shown(note)] for note in cell.notes)
                for column, cell in zip(self.columns, row, strict=True)
            ]
            for row in self.cells
        ]

    def records(self) -> list[dict[str, Value]]:
        """All rows as mappings from the columns' keys to SI values; spread and interval have keys beside them:
        `step_s` and `step_std_s`, the unit at the end."""
        rows = []
        for row in self.cells:
            record: dict[str, Value] = {}
            for column, cell in zip(self.columns, row, strict=True):
                record[column.key] = cell.value
                for part in ("std", "low", "high"):
                    if (number := getattr(cell, part)) is not None:
                        record[_UNIT_AT_END.sub(rf"_{part}\1", column.key, count=1)] = number
            rows.append(record)
        keys = dict.fromkeys(key for record in rows for key in record)
        return [{key: record.get(key) for key in keys} for record in rows]


@dataclass(frozen=True)
class Chart:
    """A chart as a Vega-Lite specification, with its title and what must be said below it."""

    title: str
    spec: Spec
    caption: str = ""


@dataclass(frozen=True)
class Answer:
    """What a command says. The terminal shows the headline, the tables that `first` names (all where it is None) and,
    unless some tables wait for `--table` or `--all`, the notes; every other format has everything.

    `charts` draws the pictures of a page, which no other format needs. `figures` are numbers that stand in sentences
    and in no table, for JSON. `data` works out the table that CSV gives where that is not the first one. `sections` are
    parts of a longer answer, each with its own title. `exit_code` is the command's.
    """

    headline: Sequence[Line] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[Line] = ()
    charts: Callable[[], Sequence[Chart]] = tuple
    title: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    data: Callable[[], Table] | None = None
    first: Sequence[str] | None = None
    sections: Sequence[Answer] = ()
    exit_code: int = 0

    def all_tables(self) -> list[Table]:
        """The tables of this answer and of its sections."""
        return [*self.tables, *(table for section in self.sections for table in section.all_tables())]


def text_of(cell: Cell, unit: Unit) -> str:
    """A cell as it is read, in the unit of its column."""
    if cell.text:
        return shown(cell.text)
    if cell.value is None:
        return MISSING
    if isinstance(cell.value, str | bool) or unit is WORDS:
        return shown(str(cell.value))
    return mean_and_std(cell.value, cell.std) if unit is MS else unit.text(cell.value)
