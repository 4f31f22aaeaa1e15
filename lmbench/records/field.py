"""How a field of a record says what it is, and what a record has of each phase.

A field is written `name: Annotated[Seconds, "title", "Meaning.", "down"] = None`: the type with its unit, a short
heading for tables, the meaning, and which direction is good, if one is. `<phase>` in title and meaning stands for the
phase that the field belongs to. A part that occurs more than once has the placeholder of its name instead:
`Annotated[DeviceReading, "<end>"]`. `lmbench fields` and the README's table read all of it from here, by `About`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, Literal, TypeAlias, TypeVar

from msgspec import Struct

from lmbench.records.vocabulary import SPANS, Span

Better = Literal["up", "down"]
T = TypeVar("T")

Text: TypeAlias = Annotated[str | None, "text"]
Flag: TypeAlias = Annotated[bool | None, "flag"]
Seconds: TypeAlias = Annotated[float | None, "s"]
Bytes: TypeAlias = Annotated[int | None, "bytes"]
Count: TypeAlias = Annotated[int | None, "count"]
Fraction: TypeAlias = Annotated[float | None, "fraction"]
Number: TypeAlias = Annotated[float | None, "1"]

#: Units of what is not a number.
NOT_NUMBERS = ("text", "flag", "tree")


@dataclass(frozen=True)
class About:
    """What a field says about itself, read off its `Annotated` type.

    `unit` is an SI unit or one of `fraction`, `count`, `index`, `1` (another ratio), `text`, `flag` (true or false) and
    `tree` (a list, or what others make up). `pattern` is the name that several fields share in the table of fields.
    """

    unit: str
    title: str
    meaning: str
    better: Better | None = None
    pattern: str | None = None

    @property
    def is_number(self) -> bool:
        return self.unit not in NOT_NUMBERS


@dataclass(frozen=True)
class Scalar(About):
    """Metadata of a step record's field that callbacks fill by `session.log_scalar`: this declaration is all that a
    new per-step metric needs beside the callback that measures it.

    `fold` joins the values that several sources log in one step: their `mean`, `sum`, or 2-`norm`.
    """

    fold: Literal["mean", "sum", "norm"] = "mean"

    def folded(self, values: Sequence[float]) -> float:
        """One value of those that several sources logged in a step."""
        if self.fold == "norm":
            return math.hypot(*values)
        return math.fsum(values) / (len(values) if self.fold == "mean" else 1)


class PerPhase(Struct, Generic[T], omit_defaults=True):
    """A value of each phase and of the whole step; None (and not in the file) where a phase was not seen."""

    step: T | None = None
    data: T | None = None
    transfer: T | None = None
    forward: T | None = None
    backward: T | None = None
    clip: T | None = None
    optimizer: T | None = None
    zero_grad: T | None = None
    other: T | None = None

    def get(self, span: Span) -> T | None:
        value: T | None = getattr(self, span)
        return value

    def set(self, span: Span, value: T) -> None:
        setattr(self, span, value)

    def items(self) -> Iterator[tuple[Span, T]]:
        """Every phase that was seen with its value: the step first, then phases in the order of a table."""
        return ((span, value) for span in SPANS if (value := self.get(span)) is not None)
