"""Published figures of five write-ups on step times, kernels, memory, attention and sums, and lmbench's own of an H200.

The CSV files have SI units. `README.md` beside them lists corrections (a precision that was called fp32 and was TF32)
and impossible figures, which are left out. It also says what each source does not state. `h200.csv` is a report of
lmbench's own runs, `h200.md` has its tables.
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


class Accumulation(Struct, frozen=True):
    """A published loop that does `total += addend` `n` times, starting at zero, with its results as they were printed.

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
    """The rows of a CSV file in this folder; a field that the source does not state is empty there."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    stated = ({field: text for field, text in row.items() if text} for row in csv.DictReader(lines))
    return tuple(msgspec.convert(row, kind, strict=False) for row in stated)
