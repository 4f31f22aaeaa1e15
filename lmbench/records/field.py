"""What a field of a record says about itself, and what a record has of each phase."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from msgspec import Struct

from lmbench.records.vocabulary import SPANS, Span

Better = Literal["up", "down"]
T = TypeVar("T")

#: Units of what is not a number.
NOT_NUMBERS = ("text", "flag", "tree")


@dataclass(frozen=True)
class About:
    """Metadata of one field, beside its type in `Annotated`.

    `unit` is an SI unit or one of `fraction`, `count`, `index`, `1` (another ratio), `text`, `flag` (true or false) and
    `tree` (a list, or what others make up). `better` says which direction is good, if one is. `title` is the short
    heading for tables; `<phase>` in title and meaning stands for the phase that the field belongs to. `pattern` is the
    name under which the table of fields tells several at once.
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


@dataclass(frozen=True)
class Part:
    """Metadata of a part that occurs more than once: the placeholder for its name in the table of fields."""

    placeholder: str


class PerPhase(Struct, Generic[T], omit_defaults=True):
    """Something of each phase and of the whole step; None (and not in the file) where a phase was not seen."""

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
        found: T | None = getattr(self, span)
        return found

    def set(self, span: Span, value: T) -> None:
        setattr(self, span, value)

    def items(self) -> Iterator[tuple[Span, T]]:
        """What there is, the step first, then phases in the order of a table."""
        for span in SPANS:
            found: T | None = getattr(self, span)
            if found is not None:
                yield span, found
