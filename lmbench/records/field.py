"""Types and documentation of record fields, and `PerPhase`, a value for each phase.

A field is declared with its type and unit, `mean_s: Seconds = None`. A line of its class's docstring documents it:
`mean_s: mean (lower is better). Mean time of <phase> on the device.` The line has a short heading for tables, the good
direction if there is one, and the meaning. In the text `<phase>` stands for the phase that the field belongs to; in a
field's name it stands for every phase. A part that occurs more than once names its placeholder in its type, as in
`Annotated[DeviceReading, "<end>"]`. `lmbench fields` shows these texts.
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

#: Units of plain types; every other type without a unit of its own is a `tree`.
UNITS: dict[Any, str] = {str: "text", bool: "flag", int: "count", float: "1"}
_FIELD = re.compile(r"^ +([\w<>]+): (.+?)(?: \((lower|higher) is better\))?\. (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class About:
    """Unit, title, meaning and good direction of a field, read from its type and its class's docstring.

    `unit` is an SI unit or one of `fraction`, `count`, `index`, `1` (another ratio), `text`, `flag` (true or false) and
    `tree` (a list, or a mapping with free keys).
    """

    unit: str
    title: str
    meaning: str
    better: Better | None = None

    @property
    def is_number(self) -> bool:
        return self.unit not in ("text", "flag", "tree")


def documented(record: type[Struct]) -> dict[str, tuple[str, str, Better | None]]:
    """Title, meaning and good direction of each field that a class's docstring documents.

    The keys are names of fields, some with a placeholder in them.
    """
    directions: dict[str, Better] = {"lower": "down", "higher": "up"}
    lines = _FIELD.findall(str(record.__doc__).partition("Attributes:")[2])
    return {name: (title, meaning, directions.get(better)) for name, title, better, meaning in lines}


@dataclass(frozen=True)
class Scalar(About):
    """Metadata of a step record's field that callbacks fill by `session.log_scalar`.

    A new per-step metric needs only this declaration and the callback that measures it. `fold` says how values that
    several sources log in one step are joined: by their `mean`, or by their 2-`norm`.
    """

    fold: Literal["mean", "norm"] = "mean"

    def folded(self, values: Sequence[float]) -> float:
        """Join the values that several sources logged in one step."""
        return math.hypot(*values) if self.fold == "norm" else statistics.fmean(values)


def part(kind: type[Struct]) -> Any:
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
