"""The result of a command before it has a format: a headline, tables of raw values, charts and notes.

A command returns an `Answer`; `lmbench.report.render` writes it in any format. Rows hold SI values (seconds, bytes,
fractions), words or None, and the column's unit says how a number is shown. So the terminal, Markdown, LaTeX and the
page show the same figures that CSV and JSON hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple

from lmbench.masking import shown
from lmbench.records.measured import Guard
from lmbench.report.units import MISSING, MS, WORDS, Unit, mean_and_std

#: The value of a cell or of a fact: text or a number; None if it is not known.
Value = float | int | str | bool | None
#: A Vega-Lite specification.
Spec = Mapping[str, Any]


class Line(NamedTuple):
    """A labelled line; a line without a label continues the one before it.

    Text that is `is_whole` is never folded, since it is there to be copied (a path, a command).
    """

    label: str
    text: str
    is_whole: bool = False


def listed(*parts: object, separator: str = ", ") -> str:
    """The parts that are not empty or zero, separated by commas."""
    return separator.join(str(part) for part in parts if part)


def labelled(label: str, first: object, *more: object, separator: str = ", ") -> list[Line]:
    """A line of the parts that are not empty or zero; no line without the first one."""
    return [Line(label, listed(first, *more, separator=separator))] if first else []


def guard_lines(guards: Iterable[Guard], prefix: str = "") -> list[Line]:
    """The messages of guards that failed or warned, failures first, each with its advice; `prefix` starts each."""
    lines = []
    for guard in sorted(guards, key=lambda guard: guard.status != "fail"):
        if guard.status in ("warn", "fail"):
            lines += [Line(guard.status.upper(), f"{prefix}{guard.message}"), *labelled("", guard.advice)]
    return lines


BLANK = Line("", "")
_UNIT_AT_END = re.compile("(_s|_bytes|_fraction|_flops)?$")


@dataclass(frozen=True)
class Column:
    """A column of a table. `name` is its key in CSV and JSON and ends in the SI unit of its numbers (`forward_s`).

    A table that is too wide for the screen first loses its `is_extra` columns. Texts of `is_shortened` columns
    (generated names) then keep only their beginning and end, and other words fold onto the next line.
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
        """The title with its unit, unless it says the unit itself (`tokens/s`)."""
        is_said = not self.unit.word or f" {self.title}".endswith(f" {self.unit.word}")
        return shown(self.title if is_said else f"{self.title} ({self.unit.word})")

    def padded(self, text: str, width: int) -> str:
        """Pad a cell's text to the column's width: numbers are aligned to the right, words to the left."""
        return text.rjust(width) if self.is_number else text.ljust(width)

    @property
    def key(self) -> str:
        return self.name or re.sub(r"\W+", "_", self.title).strip("_")


@dataclass(frozen=True)
class Cell:
    """A value with its standard deviation, its interval, a text to show instead of it, and notes.

    `p` is the p value of "the ratio is 1", after Holm's correction over the column. `text` replaces a value that the
    unit cannot express (`OOM (forward)`). On a page, `style` is the cell's CSS class, such as `outcome`, and `run_id`
    the run that the cell links to.
    """

    value: Value
    std: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    text: str = ""
    notes: tuple[str, ...] = ()
    style: str = ""
    run_id: str = ""


@dataclass(frozen=True)
class Table:
    """A table. `name` is what `--table` calls it.

    The caption states what all rows share, such as the device, and which spread is shown. With `has_total` the last
    row summarizes the others and stands apart.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value | Cell]]
    caption: str = ""
    has_total: bool = False

    @property
    def cells(self) -> list[list[Cell]]:
        """The rows, with every value as a cell."""
        return [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows]

    @property
    def notes(self) -> list[str]:
        """The notes of all cells, each once, in reading order."""
        return list(dict.fromkeys(shown(note) for row in self.cells for cell in row for note in cell.notes))

    def without_empty_columns(self) -> Table:
        """The table without the columns in which every row is empty."""
        is_kept = [any(value not in (None, "") for value in values) for values in zip(*self.rows, strict=True)]
        columns, rows = list(compress(self.columns, is_kept)), [list(compress(row, is_kept)) for row in self.rows]
        return replace(self, columns=columns, rows=rows)

    def texts(self) -> list[list[str]]:
        """The rows as they are shown; a cell with notes ends in their numbers, such as `[1]`."""
        numbers = {note: f" [{number}]" for number, note in enumerate(self.notes, start=1)}
        return [
            [
                text_of(cell, column.unit) + "".join(numbers[shown(note)] for note in cell.notes)
                for column, cell in zip(self.columns, row, strict=True)
            ]
            for row in self.cells
        ]

    def records(self) -> list[dict[str, Value]]:
        """The rows as mappings from the columns' keys to SI values.

        A standard deviation or interval has keys of its own that end in the unit: `step_s` and `step_std_s`.
        """
        rows = []
        for row in self.cells:
            record = {}
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
    """A chart as a Vega-Lite specification, with its title and the caption shown below it."""

    title: str
    spec: Spec
    caption: str = ""


@dataclass(frozen=True)
class Answer:
    """The result of a command. The terminal shows the headline and the tables that `first` names, or everything if it
    is None; `--all` and every other format show everything.

    `charts` builds the charts, which only pages and SVG files need. `figures` are numbers for JSON that stand in
    sentences and in no table. `data` builds the table that CSV holds instead of the first one; JSON has it too.
    `trace` builds the file that `--output NAME.json.gz` writes, for Perfetto. `sections` are parts of a longer answer,
    each with its own title. `exit_code` is the command's.
    """

    headline: Sequence[Line] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[Line] = ()
    charts: Callable[[], Sequence[Chart]] = tuple
    title: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    data: Callable[[], Table] | None = None
    trace: Callable[[], bytes] | None = None
    first: Sequence[str] | None = None
    sections: Sequence[Answer] = ()
    exit_code: int = 0

    def all_tables(self) -> list[Table]:
        """The tables of this answer and of its sections."""
        return [*self.tables, *(table for section in self.sections for table in section.all_tables())]


def text_of(cell: Cell, unit: Unit) -> str:
    """A cell as it is shown, in the unit of its column."""
    if cell.text:
        return shown(cell.text)
    if cell.value is None:
        return MISSING
    if isinstance(cell.value, str | bool) or unit is WORDS:
        return shown(str(cell.value))
    return mean_and_std(cell.value, cell.std) if unit is MS else unit.text(cell.value)
