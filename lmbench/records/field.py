"""How a field of a record says what it is, and what a record has of each phase.

A field is written with its type and unit, `mean_s: Seconds = None`, and documented in its class's docstring by a line
`mean_s: mean (lower is better). Mean device span of <phase>.`: a short heading for tables, which direction is good, if
one is, and the meaning. `<phase>` there stands for the phase that the field belongs to; in a field's name, for each of
the phases. A part that occurs more than once has the placeholder of its name as `Annotated[DeviceReading, "<end>"]`.
`lmbench fields` and the README's table read all of it from here.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from msgspec import Struct, field

from lmbench.records.vocabulary import SPANS, Span

Better = Literal["up", "down"]
T = TypeVar("T")

Text: TypeAlias = str | None
Flag: TypeAlias = bool | None
Count: TypeAlias = int | None
Number: TypeAlias = float | None
Index: TypeAlias = Annotated[int | None, "index"]
Bytes: TypeAlias = Annotated[int | None, "bytes"]
FlopCount: TypeAlias = Annotated[int | None, "FLOP"]
Seconds: TypeAlias = Annotated[float | None, "s"]
Fraction: TypeAlias = Annotated[float | None, "fraction"]
Nats: TypeAlias = Annotated[float | None, "nat"]
Hertz: TypeAlias = Annotated[float | None, "Hz"]
Watts: TypeAlias = Annotated[float | None, "W"]
Joules: TypeAlias = Annotated[float | None, "J"]
Celsius: TypeAlias = Annotated[float | None, "°C"]
FlopsPerSecond: TypeAlias = Annotated[float | None, "FLOP/s"]

#: Units of types that name none; of any other type it is `tree`.
UNITS: dict[Any, str] = {str: "text", bool: "flag", int: "count", float: "1"}
_FIELD = re.compile(r"^ +([\w<>]+): (.+?)(?: \((lower|higher) is better\))?\. (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class About:
    """What a field says about itself, read off its type and its class's docstring.

    `unit` is an SI unit or one of `fraction`, `count`, `index`, `1` (another ratio), `text`, `flag` (true or false) and
    `tree` (a list, or what others make up).
    """

    unit: str
    title: str
    meaning: str
    better: Better | None = None

    @property
    def is_number(self) -> bool:
        return self.unit not in ("text", "flag", "tree")


def documented(record: type[Struct]) -> dict[str, tuple[str, str, Better | None]]:
    """Title, meaning and good direction of each field that a class's docstring documents, by name, which may have a
    placeholder in it."""
    directions: dict[str, Better] = {"lower": "down", "higher": "up"}
    lines = _FIELD.findall(str(record.__doc__).partition("Attributes:")[2])
    return {name: (title, meaning, directions.get(better)) for name, title, better, meaning in lines}


@dataclass(frozen=True)
class Scalar(About):
    """Metadata of a step record's field that callbacks fill by `session.log_scalar`: this declaration is all that a
    new per-step metric needs beside the callback that measures it.

    `fold` joins the values that several sources log in one step: their `mean`, or 2-`norm`.
    """

    fold: Literal["mean", "norm"] = "mean"

    def folded(self, values: Sequence[float]) -> float:
        """One value of those that several sources logged in a step."""
        return math.hypot(*values) if self.fold == "norm" else statistics.fmean(values)


def part(kind: type[Struct]) -> Any:
    """The default of a part that a record always has: one of which nothing is known."""
    return field(default_factory=kind)


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


PhaseBytes: TypeAlias = Annotated[PerPhase[int] | None, "bytes"]
