"""Published figures: what five write-ups state of step times, kernels, memory, attention and sums.

The files hold what was really measured, in SI units: `README.md` beside them says what was corrected (a precision that
was called fp32 and was TF32), what is left out because it cannot be right, and what each source does not state.
`h200.csv` is a report of lmbench's own runs, `h200.md` its tables.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

_Row = TypeVar("_Row", bound=Struct)
FOLDER = Path(__file__).parent


class Figure(Struct, frozen=True):
    """One published figure.

    `column` is lmbench's name of the quantity, `value` is in SI and None where the run was out of memory; `text` is
    shown instead of the value. Of the others None stands for what the write-up does not state, which `caveats` names;
    a precision that it does not state is float32, and `head_dim` is that of attention by itself.
    """

    label: str
    column: str
    precision: str
    is_compiled: bool
    value: float | None = None
    std: float | None = None
    text: str = ""
    caveats: str = ""
    size: str | None = None
    mode: str | None = None
    batch: int | None = None
    context: int | None = None
    head_dim: int | None = None
    matmul: str | None = None
    attention: str | None = None
    warmup: int | None = None


class Accumulation(Struct, frozen=True):
    """One published loop, `n` times `total += addend` from zero, and the sums that were printed, as they were printed.

    With `is_cast` the addend was converted to float32 before it was added.
    """

    accumulator: str
    addend_dtype: str
    is_cast: bool
    n: int
    addend: float
    results: str = ""
    sources: str = ""


@cache
def load_rows(name: str, kind: type[_Row]) -> tuple[_Row, ...]:
    """The rows of a file beside this one; an empty field is what its source does not state."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    stated = ({field: text for field, text in row.items() if text} for row in csv.DictReader(lines))
    return tuple(msgspec.convert(row, kind, strict=False) for row in stated)
