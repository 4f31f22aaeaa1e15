"""The ratio of two groups of processes, by Welch's t on logarithms (design section 8): one process is one sample."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
#: The standard deviation of normal values over their median absolute deviation.
STD_PER_MAD = 1.4826
#: Of the interval that has to lie within a tolerance: two one-sided tests at 5 % each (Schuirmann, Journal of
#: Pharmacokinetics and Biopharmaceutics 15, 1987).
EQUIVALENCE_CONFIDENCE = 0.90
#: With this probability the repeats that a hint names give the verdict.
POWER = 0.90
#: Spreads of logarithms below this are rounding: the values are equal (peaks of memory often are).
_EQUAL = 1e-12
_POINTS = 100
_MOST_REPEATS = 1000
_MOST_LOG = math.log(sys.float_info.max)


@dataclass(frozen=True)
class Ratio:
    """How many times A's value B's is, from the geometric means of both sides.

    `low` and `high` are the ends of the 95 % interval, `equal_low` and `equal_high` those of the 90 % interval, `p` is
    two-sided for a ratio of 1; None with fewer than two values on a side. `std_a` and `std_b` are standard deviations
    of logarithms, which for a spread of a few percent is the spread as a fraction.
    """

    ratio: float
    low: float | None
    high: float | None
    p: float | None
    n_a: int
    n_b: int
    std_a: float | None
    std_b: float | None
    equal_low: float | None
    equal_high: float | None

    @property
    def is_by_rounds(self) -> bool:
        """Whether values are paired by the round that they were measured in."""
        return False

    @property
    def change(self) -> float:
        """The change from A to B as a fraction: 0.02 is 2 % more."""
        return self.ratio - 1.0

    @property
    def excludes_one(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 1.0 or self.high < 1.0)

    def lies_within(self, tolerance: float) -> bool:
        """Whether the ratio does, from 1 / (1 + tolerance) to 1 + tolerance, by two one-sided tests at 5 %: whether
        the whole 90 % interval does."""
        if self.equal_low is None or self.equal_high is None:
            return False
        return self.equal_low >= 1.0 / (1.0 + tolerance) and self.equal_high <= 1.0 + tolerance

    def needed(self, tolerance: float) -> int | None:
        """Repeats a side that give a verdict with 90 % probability, see `repeats_for`."""
        spread = math.sqrt(((self.std_a or 0.0) ** 2 + (self.std_b or 0.0) ** 2) / 2)
        return repeats_for(spread, self.n_a + self.n_b - 2, tolerance)


def ratio_of(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """B over A, each value the mean of one process.

    The interval is Welch's (Biometrika 34, 1947, with the degrees of freedom of Satterthwaite 1946) for the
    difference of the mean logarithms. Where the values of both sides have no spread it is the ratio itself.
    Raises ValueError for an empty side or a value that is not above 0.
    """
    logs_a, logs_b = _logs(a), _logs(b)
    difference = statistics.fmean(logs_b) - statistics.fmean(logs_a)
    std_a, std_b = std_of_logs(logs_a), std_of_logs(logs_b)
    if std_a is None or std_b is None:
        return Ratio(ratio_from(difference), None, None, None, len(a), len(b), std_a, std_b, None, None)
    halves, p = _half_widths(difference, std_a**2 / len(a), std_b**2 / len(b), len(a), len(b))
    (low, high), (equal_low, equal_high) = (
        (ratio_from(difference - half), ratio_from(difference + half)) for half in halves
    )
    return Ratio(ratio_from(difference), low, high, p, len(a), len(b), std_a, std_b, equal_low, equal_high)


def _half_widths(
    difference: float, part_a: float, part_b: float, n_a: int, n_b: int
) -> tuple[tuple[float, float], float]:
    """Half of either interval and p, from the squared standard errors of both means."""
    from scipy import special  # type: ignore[import-untyped]

    square = part_a + part_b
    if square == 0:
        return (0.0, 0.0), 1.0 if abs(difference) < _EQUAL else 0.0
    freedom = square**2 / (part_a**2 / (n_a - 1) + part_b**2 / (n_b - 1))
    error = math.sqrt(square)
    wide, narrow = (float(special.stdtrit(freedom, 0.5 + c / 2)) for c in (CONFIDENCE, EQUIVALENCE_CONFIDENCE))
    return (wide * error, narrow * error), 2.0 * float(special.stdtr(freedom, -abs(difference) / error))


def detectable_fraction(std: float, repeats: int) -> float:
    """The change that two sides of `repeats` processes each tell from none in 95 % of cases.

    `std` is that of the logarithms of process means. By the usual sum of two quantiles of Student's t for a
    two-sided test (Cohen, Statistical Power Analysis, 1988, section 2.4).
    """
    from scipy import special

    freedom = _expected_freedom(repeats)
    quantiles = special.stdtrit(freedom, 0.5 + CONFIDENCE / 2) + special.stdtrit(freedom, CONFIDENCE)
    return math.expm1(float(quantiles) * std * math.sqrt(2.0 / repeats))


def repeats_for(std: float, freedom: float, tolerance: float) -> int | None:
    """Repeats a side that give a verdict with 90 % probability: `same` where nothing changed, and `faster` or `slower`
    where the tolerance's worth did, whichever takes more; None above 1000.

    By the power of both tests for two normal sides with one spread: of two one-sided t tests at no change, of Welch's t
    at the tolerance. The spread is what `std` says, seen with `freedom` degrees of freedom: the power is the mean over
    what the true one may be (sigma^2 = freedom * std^2 / chi^2) and over what the repeats will show of it, each at
    `_POINTS` equally likely values. Without the former 90 % would be about 70 %, since a spread from a few repeats is
    as often too small as too large.
    """
    if std == 0:
        return 2
    low, high = 1, _MOST_REPEATS
    if _power(std, freedom, tolerance, high) < POWER:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _power(std, freedom, tolerance, middle) >= POWER else (middle, high)
    return high


def _power(std: float, freedom: float, tolerance: float, repeats: int) -> float:
    import numpy as np
    from scipy import special

    shares = (np.arange(_POINTS) + 0.5) / _POINTS
    true = std * np.sqrt(freedom / special.chdtri(freedom, shares))[:, None]
    ours = 2 * (repeats - 1)
    seen = true * np.sqrt(special.chdtri(ours, shares) / ours)
    error = math.sqrt(2 / repeats)
    limit = math.log1p(tolerance)
    one_sided, two_sided = (special.stdtrit(ours, 0.5 + c / 2) for c in (EQUIVALENCE_CONFIDENCE, CONFIDENCE))
    room = (limit - one_sided * seen * error) / (true * error)
    same = np.maximum(0.0, 2 * special.ndtr(room) - 1).mean()
    changed = special.ndtr((limit - two_sided * seen * error) / (true * error)).mean()
    return float(min(same, changed))


def _expected_freedom(repeats: int) -> float:
    """Welch's degrees of freedom to expect of two sides with one spread.

    With u the share of one side's squared error they are (n - 1) / (u^2 + (1 - u)^2), and u has mean 1/2 and variance
    1 / (4 n), being Beta((n - 1) / 2, (n - 1) / 2).
    """
    return 2.0 * (repeats - 1) * repeats / (repeats + 1)


def ratio_from(log: float) -> float:
    """The ratio that a difference of logarithms is; infinite where no float is so large."""
    return math.exp(log) if log < _MOST_LOG else math.inf


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(_logs(values)))


def _logs(values: Sequence[float]) -> list[float]:
    if not values:
        raise ValueError("a side without values has no ratio")
    if not all(value > 0 and math.isfinite(value) for value in values):
        raise ValueError("only values above 0 have a ratio")
    return [math.log(value) for value in values]


def std_of_logs(logs: Sequence[float]) -> float | None:
    """Their standard deviation, None for fewer than two; 0 where they are equal but for rounding."""
    if len(logs) < 2:
        return None
    std = statistics.stdev(logs)
    return std if std > _EQUAL else 0.0
