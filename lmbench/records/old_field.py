"""What one field of a record is, and how a group of them is declared."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from lmbench.records.vocabulary import BORDERS, PHASES

Better = Literal["up", "down"]
Kind = Literal["step", "run"]

#: A row of a group: name, unit, title, meaning, and which direction is better.
Row = tuple[str, str, str, str] | tuple[str, str, str, str, Better]

#: Units of what is not a number.
NOT_NUMBERS = ("text", "flag", "tree")

#: Parts of a name that stand for several; each is spelt in the table as it is here.
PLACEHOLDERS = {
    "<phase>": (*PHASES, "step"),
    "<border>": BORDERS,
    "<end>": ("open", "close"),
}


@dataclass(frozen=True)
class Field:
    """One field of run.json (dotted path) or of a step record.

    `unit` is an SI unit or one of `fraction`, `count`, `index`, `1` (another ratio), `text`, `flag` (true or
    false) and `tree` (a list or free-form part; everything under it belongs to it). `better` says which
    direction is good, if one is. `title` is the short heading for tables. A name with a placeholder such as
    `<phase>` stands for all of its values.
    """

    name: str
    unit: str
    meaning: str
    better: Better | None
    record: Literal["step", "run", "both"]
    title: str
    group: str

    @property
    def is_number(self) -> bool:
        return self.unit not in NOT_NUMBERS

    @property
    def is_pattern(self) -> bool:
        return "<" in self.name

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        pattern = re.escape(self.name)
        for index, (placeholder, values) in enumerate(PLACEHOLDERS.items()):
            pattern = pattern.replace(re.escape(placeholder), f"(?P<p{index}>{'|'.join(values)})")
        return re.compile(pattern)

    def resolve(self, name: str) -> Field | None:
        """This field under a concrete name, its placeholders filled in; None if the name is not its own."""
        match = self._regex.fullmatch(name)
        if match is None:
            return None
        title, meaning = self.title, self.meaning
        for index, placeholder in enumerate(PLACEHOLDERS):
            value = match.groupdict().get(f"p{index}")
            if value is not None:
                title, meaning = title.replace(placeholder, value), meaning.replace(placeholder, value)
        return replace(self, name=name, title=title, meaning=meaning)


def group(
    name: str, record: Literal["step", "run", "both"], rows: tuple[Row, ...], prefix: str = ""
) -> tuple[Field, ...]:
    """Fields of one group of the table, each row's name with the prefix before it."""
    fields = []
    for row in rows:
        better = row[4] if len(row) == 5 else None
        fields.append(Field(f"{prefix}{row[0]}", row[1], row[3], better, record, row[2], name))
    return tuple(fields)
