"""Types and documentation of record fields, and `PerPhase`, a value for each phase.

A `record` is a dataclass, which msgspec reads and writes like its own classes. A field is declared once, with its type,
its unit and its documentation: `median_s: Seconds = lower("Median time of <phase>.")`. In the texts `<phase>` stands
for the phase that the field belongs to. A part that occurs more than once names its placeholder in its type, as in
`Annotated[DeviceReading, "<end>"]`. `lmbench fields` shows these texts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar, dataclass_transform

from msgspec import Meta, Struct

from lmbench.records.vocabulary import SPANS, Span

Better = Literal["up", "down"]
#: How the numbers of several runs become one. Rates are averaged harmonically, to agree with the mean step time.
Over = Literal["mean", "harmonic mean", "max", "min", "sum"]
T = TypeVar("T")

Text: TypeAlias = str | None
Flag: TypeAlias = bool | None
Count: TypeAlias = int | None
Number: TypeAlias = float | None
#: A rate in a damaged record may be infinite or below zero.
_Rate: TypeAlias = Annotated[float, Meta(ge=0, le=1e24)]
Index: TypeAlias = Annotated[int | None, "index"]
Bytes: TypeAlias = Annotated[int | None, "bytes"]
FlopCount: TypeAlias = Annotated[int | None, "FLOP"]
#: A time in a damaged record may be infinite or far below zero; a remainder may be a little below.
Seconds: TypeAlias = Annotated[Annotated[float, Meta(ge=-0.1, le=1e12)] | None, "s"]
#: Seconds before or after something else.
Offset: TypeAlias = Annotated[float | None, "s"]
Fraction: TypeAlias = Annotated[float | None, "fraction"]
Nats: TypeAlias = Annotated[float | None, "nat"]
Hertz: TypeAlias = Annotated[float | None, "Hz"]
Watts: TypeAlias = Annotated[float | None, "W"]
Joules: TypeAlias = Annotated[float | None, "J"]
Celsius: TypeAlias = Annotated[float | None, "°C"]
FlopsPerSecond: TypeAlias = Annotated[_Rate | None, "FLOP/s"]
TokensPerSecond: TypeAlias = Annotated[_Rate | None, "tokens/s"]

#: Units of plain types; every other type without a unit of its own is a `tree`.
UNITS: dict[Any, str] = {str: "text", bool: "flag", int: "count", float: "1"}
#: The key of a field's documentation in the field's metadata.
ABOUT = "about"


@dataclass(frozen=True)
class About:
    """Documentation of a field.

    Attributes:
        meaning: sentences on what the field is.
        title: short heading for tables; by default the field's name without its unit.
        better: the good direction, if there is one.
        over: how the numbers of several runs become one in a table.
        pattern: the field's name with a placeholder, where each of several fields stands for one phase.
        unit: an SI unit or one of `fraction`, `count`, `index`, `1` (another ratio), `text`, `flag` (true or false) and
            `tree` (a list, or a mapping with free keys). The schema reads it from the field's type.
    """

    meaning: str
    title: str = ""
    better: Better | None = None
    over: Over = "mean"
    pattern: str = ""
    unit: str = ""

    @property
    def is_number(self) -> bool:
        return self.unit not in ("text", "flag", "tree")


def mean_of(values: Sequence[float]) -> float:
    """The mean; nan for infinities of both signs, for which `statistics.fmean` raises."""
    return statistics.fmean(values) if all(map(math.isfinite, values)) else sum(values) / len(values)


def about(
    meaning: str, title: str = "", *, default: Any = None, factory: Callable[[], Any] | None = None, **facts: Any
) -> Any:
    """A dataclass's field with its documentation, the `facts` of `About`; its default is None unless one is given."""
    metadata = {ABOUT: About(meaning, title, **facts)}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


#: Fields whose lower, or higher, values are better.
lower, higher = partial(about, better="down"), partial(about, better="up")


@dataclass_transform()
def record(kind: type[T]) -> type[T]:
    """Make a record, or a part of one, of a class: a dataclass with slots, whose fields `about` documents."""
    return dataclass(slots=True)(kind)


def part(kind: type) -> Any:
    """Default for a part that every record has: an empty instance."""
    return field(default_factory=kind)


class PerPhase(Struct, Generic[T], omit_defaults=True):
    """A value for each phase and for the whole step; None, and left out of the file, for a phase that was not seen."""

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
        """Every phase that was seen, with its value: first the step, then the phases in the order of SPANS."""
        return ((span, value) for span in SPANS if (value := self.get(span)) is not None)


PhaseBytes: TypeAlias = Annotated[PerPhase[int] | None, "bytes"]
