"""What `lmbench numerics` found: typed, as its JSON has it."""

from __future__ import annotations

import json
from typing import Literal

from msgspec import Struct

from lmbench.records.codec import as_dict
from lmbench.records.environment import Environment


class PublishedSum(Struct, kw_only=True):
    """A published loop, run here: `n` additions of `addend`. `published` are the figures as sources print them."""

    accumulator: str
    addend_dtype: str
    is_cast: bool
    n: int
    addend: float
    total: float
    published: dict[str, str]

    @property
    def differing(self) -> dict[str, str]:
        """Published figures that are not this total rounded to their decimals, each with what that is."""
        here = {figure: f"{self.total:.{len(figure.partition('.')[2])}f}" for figure in self.published.values()}
        return {figure: rounded for figure, rounded in here.items() if rounded != figure}


class Sum(Struct):
    """One way to add up; None where the total is infinite.

    `error_fraction` is relative to n times the addend as it was given; `summing_error_fraction` to n times the addend
    as its format holds it, so that it is the summation's alone.
    """

    total: float | None
    error_fraction: float | None
    summing_error_fraction: float | None


class Summation(Struct, kw_only=True):
    """`n` addends by a loop and by `torch.sum(addends, dtype=accumulator)`.

    `stalls_at` is the total from which on the loop no longer changes, after `stalls_after` additions; None where it
    overflows before. The loop is worked out exactly; its first `tried_additions` were made in PyTorch too, and
    `is_exact` says that they gave the same.
    """

    accumulator: str
    addend_dtype: str
    n: int
    rounded_addend: float
    loop: Sum
    reduction: Sum
    stalls_at: float | None
    stalls_after: int | None
    tried_additions: int
    is_exact: bool


class CurvePoint(Struct):
    """Both ways at one `n`."""

    n: int
    loop: Sum
    reduction: Sum


class Curve(Struct):
    """Both ways against n, for one pair of formats."""

    accumulator: str
    addend_dtype: str
    points: list[CurvePoint]


class Threshold(Struct, kw_only=True):
    """Where an operator begins to fail as its input grows (`above`) or shrinks (`below`), or that it does not.

    It fails where what comes out is not finite, is zero, or is off by a factor of two or more, while the same steps in
    float64 give a finite number other than zero. `holds_to` and `fails_from` are neighbours in the input's format; both
    are None where it holds for all normal numbers, and `holds_to` alone where it holds for none. `formula` is where it
    has to fail, None where that depends on the kernel. `first` is the step that fails first there, `gives` what comes
    out.
    """

    operator: str
    form: str
    dtype: str
    input: str
    side: Literal["above", "below"]
    holds_to: float | None = None
    fails_from: float | None = None
    formula: float | None = None
    first: str = ""
    gives: str = ""
    advice: str = ""

    @property
    def name(self) -> str:
        return f"{self.operator}: {self.form}"


class Numerics(Struct, kw_only=True):
    """Everything that was found on one device."""

    schema_version: Literal[1]
    measured_at: str
    environment: Environment
    n: int
    addend: float
    width: int
    eps: float
    published: list[PublishedSum]
    sums: list[Summation]
    curves: list[Curve]
    thresholds: list[Threshold]

    def as_json(self) -> str:
        return json.dumps(as_dict(self), indent=1, allow_nan=False)
