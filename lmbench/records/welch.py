"""The ratio of two groups of processes, by Welch's t on logarithms (design section 8): one process is one sample."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
#: Spreads of logarithms below this are rounding: the values are equal (peaks of memory often are).
_EQUAL = 1e-12


@dataclass(frozen=True)
class Ratio:
    """How many times A's value B's is, from the geometric means of both sides.

    `low` and `high` are the ends of the 95 % interval, `p` is two-sided for a ratio of 1; None with fewer than two
    values on a side. `std_a` and `std_b` are standard deviations of logarithms, which for a spread of a few percent
    is the spread as a fraction.
    """

    ratio: float
    low: float | None
    high: float | None
    p: float | None
    n_a: int
    n_b: int
    std_a: float | None
    std_b: float | None

    @property
    def change(self) -> float:
        """The change from A to B as a fraction: 0.02 is 2 % more."""
        return self.ratio - 1.0

    @property
    def excludes_one(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 1.0 or self.high < 1.0)

    def lies_within(self, tolerance: float) -> bool:
        """Whether the whole interval does, from 1 / (1 + tolerance) to 1 + tolerance."""
        if self.low is None or self.high is None:
            return False
        return self.low >= 1.0 / (1.0 + tolerance) and self.high <= 1.0 + tolerance


def ratio_of(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """B over A, each value the mean of one process.

    The interval is Welch's (Biometrika 34, 1947, with the degrees of freedom of Satterthwaite 1946) for the
    difference of the mean logarithms. Where the values of both sides have no spread it is the ratio itself.
    Raises ValueError for an empty side or a value that is not above 0.
    """
    logs_a, logs_b = _logs(a), _logs(b)
    difference = statistics.fmean(logs_b) - statistics.fmean(logs_a)
    std_a, std_b = _std(logs_a), _std(logs_b)
    if std_a is None or std_b is None:
        return Ratio(math.exp(difference), None, None, None, len(a), len(b), std_a, std_b)
    half, p = _half_width(difference, std_a**2 / len(a), std_b**2 / len(b), len(a), len(b))
    low, high = math.exp(difference - half), math.exp(difference + half)
    return Ratio(math.exp(difference), low, high, p, len(a), len(b), std_a, std_b)


def _half_width(difference: float, part_a: float, part_b: float, n_a: int, n_b: int) -> tuple[float, float]:
    """Half the interval and p, from the squared standard errors of both means."""
    from scipy import special  # type: ignore[import-untyped]

    square = part_a + part_b
    if square == 0:
        return 0.0, 1.0 if abs(difference) < _EQUAL else 0.0
    freedom = square**2 / (part_a**2 / (n_a - 1) + part_b**2 / (n_b - 1))
    error = math.sqrt(square)
    quantile = float(special.stdtrit(freedom, 0.5 + CONFIDENCE / 2))
    return quantile * error, 2.0 * float(special.stdtr(freedom, -abs(difference) / error))


def detectable_fraction(std: float, repeats: int) -> float:
    """The change that two sides of `repeats` processes each tell from none in 95 % of cases.

    `std` is that of the logarithms of process means. By the usual sum of two quantiles of Student's t for a
    two-sided test (Cohen, Statistical Power Analysis, 1988, section 2.4).
    """
    from scipy import special

    freedom = _expected_freedom(repeats)
    quantiles = special.stdtrit(freedom, 0.5 + CONFIDENCE / 2) + special.stdtrit(freedom, CONFIDENCE)
    return math.expm1(float(quantiles) * std * math.sqrt(2.0 / repeats))


def repeats_for(std: float, tolerance: float, most: int = 100) -> int | None:
    """Repeats a side at which an interval around no change lies within the tolerance; None above `most`."""
    from scipy import special

    for repeats in range(2, most + 1):
        quantile = float(special.stdtrit(_expected_freedom(repeats), 0.5 + CONFIDENCE / 2))
        if quantile * std * math.sqrt(2.0 / repeats) <= math.log1p(tolerance):
            return repeats
    return None


def _expected_freedom(repeats: int) -> float:
    """Welch's degrees of freedom to expect of two sides with one spread.

    With u the share of one side's squared error they are (n - 1) / (u^2 + (1 - u)^2), and u has mean 1/2 and variance
    1 / (4 n), being Beta((n - 1) / 2, (n - 1) / 2).
    """
    return 2.0 * (repeats - 1) * repeats / (repeats + 1)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(_logs(values)))


def _logs(values: Sequence[float]) -> list[float]:
    if not values:
        raise ValueError("a side without values has no ratio")
    if not all(value > 0 and math.isfinite(value) for value in values):
        raise ValueError("only values above 0 have a ratio")
    return [math.log(value) for value in values]


def _std(logs: Sequence[float]) -> float | None:
    if len(logs) < 2:
        return None
    std = statistics.stdev(logs)
    return std if std > _EQUAL else 0.0
