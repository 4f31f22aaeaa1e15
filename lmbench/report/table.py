"""A table before it is Markdown or HTML: headings, rows of entries, and the notes that rows refer to; and the lines
around tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lmbench.text import shown

Kind = Literal["fact", "number", "outcome", "missing"]


@dataclass(frozen=True)
class Heading:
    """A column's heading; numbers are aligned to the right.

    The words of an `is_generated` column (kernels' names, say) may be shortened where the screen is narrow; those of an
    `is_folded` one (modules' paths, whose ends and middles tell them apart) go on in the next line. Where even so it is
    too narrow, the columns that are `is_extra` are the first to be left out.
    """

    text: str
    is_number: bool = True
    is_generated: bool = False
    is_folded: bool = False
    is_extra: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", shown(self.text))


@dataclass(frozen=True)
class Entry:
    """One cell of a table; `notes` are numbers of the table's notes."""

    text: str
    kind: Kind = "number"
    notes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", shown(self.text))

    @property
    def full_text(self) -> str:
        return " ".join([self.text, *(f"[{note}]" for note in self.notes)])


@dataclass
class Table:
    """A table with its caption, which names the device, what all rows share and which spread is shown.

    With `has_total` the last row is what the others sum up to. `name` is what `--table` calls it.
    """

    title: str
    caption: str
    headings: list[Heading]
    rows: list[list[Entry]]
    notes: list[str] = field(default_factory=list)
    has_total: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        self.title, self.caption = shown(self.title), shown(self.caption)

    def note(self, text: str) -> int:
        """The number of a note, counted from 1; the same text has one number."""
        text = shown(text)
        if text not in self.notes:
            self.notes.append(text)
        return self.notes.index(text) + 1


#: Label and text; without a label the text goes on with what the line before is about.
Line = tuple[str, str]
#: What is read one after the other.
Part = Line | Table
BLANK: Line = ("", "")


def words(*names: str) -> list[Heading]:
    """Headings of columns of words."""
    return [Heading(name, is_number=False) for name in names]


def generated(*names: str) -> list[Heading]:
    """Headings of columns of generated names."""
    return [Heading(name, is_number=False, is_generated=True) for name in names]


def paths(*names: str) -> list[Heading]:
    """Headings of columns of paths, and of what else has to stay whole."""
    return [Heading(name, is_number=False, is_folded=True) for name in names]


def numbers(*names: str) -> list[Heading]:
    """Headings of columns of numbers."""
    return [Heading(name) for name in names]


def fact(text: str) -> Entry:
    """What a row is about, or another word in it."""
    return Entry(text, "fact")
