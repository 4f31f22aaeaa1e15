"""Statistics of one series of values, the ratio of two groups of processes, and level changes in a series.

SciPy's submodules load at first use, 0.3 s for `special` and 0.9 s for `stats`; `import scipy` alone takes 20 ms.
So commands that only read results do not wait for them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import scipy  # type: ignore[import-untyped]

from lmbench.records.vocabulary import MIN_REPEATS

Floats = npt.NDArray[np.float64]
Verdict = Literal["same", "larger", "smaller", "undecided"]

CONFIDENCE = 0.95
#: Confidence of the interval that must lie within a tolerance. It amounts to two one-sided tests at 5 % each
#: (Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987).
EQUIVALENCE_CONFIDENCE = 0.90
#: The standard deviation of normal values divided by their median absolute deviation (MAD).
STD_PER_MAD = 1.4826
#: Modified z-score of an outlier (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993).
OUTLIER_SCORE = 3.5
#: The trend is fitted to the medians of at most this many blocks: all pairs of 10 000 steps would take seconds.
TREND_BLOCKS = 100
#: Logarithms whose spread is below this differ only by rounding, as memory peaks often do.
EQUAL = 1e-12


def sample_std(values: Sequence[float]) -> float | None:
    """Standard deviation with n - 1 degrees of freedom, None below two values."""
    # Without the exact mean of `fmean` equal values could have a standard deviation above 0.
    return float(np.std(np.asarray(values) - statistics.fmean(values), ddof=1)) if len(values) > 1 else None


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of independent values, such as the means of processes, by Student's t.

    Raises ValueError below two values: one value has no spread.
    """
    mean, std = statistics.fmean(values), sample_std(values)
    if std is None:
        raise ValueError("an interval of the mean takes two values")
    half = student_quantile(len(values) - 1) * std / math.sqrt(len(values))
    return mean - half, mean + half


def student_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """The value that |t| stays below with this probability, t Student's with `freedom` degrees of freedom."""
    return float(scipy.special.stdtrit(freedom, 0.5 + confidence / 2))


def median_interval(ordered: Sequence[float]) -> tuple[float, float, float] | None:
    """Order-statistic interval of the median of sorted values: (low, high, exact coverage), None below six values.

    The interval goes from the k-th smallest to the k-th largest value. It covers the median of independent draws with
    probability 1 - 2 P(B < k), where B is binomial(n, 1/2) (David and Nagaraja, Order Statistics, section 7.1). k is
    the largest with a coverage of at least 95 %; below n = 6 no k has it.
    """
    n = len(ordered)
    if n < 6:
        return None
    rank = int(scipy.special.bdtrik((1 - CONFIDENCE) / 2, n, 0.5)) + 1
    return ordered[rank - 1], ordered[n - rank], 1 - 2 * float(scipy.special.bdtr(rank - 1, n, 0.5))


def lag1_autocorrelation(values: Sequence[float] | Floats) -> float | None:
    """Correlation of each value with the next one, None below three values and for a constant series."""
    deviations = np.asarray(values) - statistics.fmean(values)
    square = float(deviations @ deviations)
    return float(deviations[:-1] @ deviations[1:]) / square if len(values) > 2 and square else None


def outlier_count(values: Sequence[float]) -> int:
    """The number of values whose modified z-score |x - median| / (1.4826 MAD) is above 3.5.

    Where more than half of the values are equal, as with a coarse clock, the MAD is 0. Then 1.2533 times the mean
    absolute deviation, which also is the standard deviation of normal values, replaces 1.4826 MAD.
    """
    deviations = np.abs(np.asarray(values) - np.median(values))
    scale = robust_std(values) or 1.2533 * deviations.mean()
    return int((deviations > OUTLIER_SCORE * scale).sum())


def robust_std(values: Sequence[float]) -> float:
    """The standard deviation of normal values by their median absolute deviation, which few outliers do not move."""
    return float(STD_PER_MAD * np.median(np.abs(np.asarray(values) - np.median(values))))


def trimean(lower: float, middle: float, upper: float) -> float:
    """A typical value from the quartiles (Tukey, Exploratory Data Analysis, 1977)."""
    return (lower + 2 * middle + upper) / 4


def trend(values: Sequence[float]) -> tuple[float, float] | None:
    """The drift from the first to the last value as a fraction of the first, and its p value; None below six values.

    The drift is the rise of the Theil-Sen line (Theil 1950, Sen 1968). Its ends are clamped to the range of each half
    of the values, so that one level shift is not extrapolated. p is the two-sided p of Kendall's S against time, by
    the tie-corrected normal approximation (Mann 1945). Above 100 values both use the medians of 100 blocks.
    """
    n = len(values)
    if n < 6:
        return None
    count = min(n, TREND_BLOCKS)
    times = np.array([block.mean() for block in np.array_split(np.arange(n), count)])
    levels = np.array([np.median(block) for block in np.array_split(values, count)])
    line = scipy.stats.theilslopes(levels, times, method="joint")
    half = (levels.size + 1) // 2
    first = np.clip(line.intercept, levels[:half].min(), levels[:half].max())
    last = np.clip(line.intercept + line.slope * (n - 1), levels[-half:].min(), levels[-half:].max())
    chance = scipy.stats.kendalltau(times, levels, method="asymptotic").pvalue
    return float(last / first - 1) if first > 0 else 0.0, 1.0 if math.isnan(chance) else float(chance)


def slope(times: Floats, values: Floats) -> tuple[float, float]:
    """The Theil-Sen slope of values over times, and the lower end of its 95 % interval (Sen 1968), from at most 400
    even points."""
    chosen = np.linspace(0, len(values) - 1, min(len(values), 400)).astype(int)
    line = scipy.stats.theilslopes(values[chosen], times[chosen], CONFIDENCE)
    return float(line.slope), float(line.low_slope)


@dataclass(frozen=True)
class Ratio:
    """The ratio B over A of the geometric means of two sides; one process is one sample.

    `low` and `high` are the ends of the 95 % interval, `equal_low` and `equal_high` the ends of the 90 % interval; `p`
    is the two-sided p value of "the ratio is 1". All are None with fewer than two values on a side. `std_a` and `std_b`
    are standard deviations of logarithms: at a few percent, the spread as a fraction.
    """

    point: float
    low: float | None
    high: float | None
    p: float | None
    n_a: int
    n_b: int
    std_a: float | None
    std_b: float | None
    equal_low: float | None
    equal_high: float | None
    #: log(B / A) of each round, where the sides were measured in turn; else empty.
    differences: tuple[float, ...] = ()

    @property
    def change(self) -> float:
        """The change from A to B as a fraction: 0.02 is 2 % more."""
        return self.point - 1.0

    @property
    def excludes_one(self) -> bool:
        return self.lies_beyond(0.0)

    def lies_within(self, tolerance: float) -> bool:
        """Whether the 90 % interval lies between 1 / (1 + tolerance) and 1 + tolerance, which amounts to two one-sided
        tests at 5 % each."""
        if self.equal_low is None or self.equal_high is None:
            return False
        return self.equal_low >= 1.0 / (1.0 + tolerance) and self.equal_high <= 1.0 + tolerance

    def lies_beyond(self, tolerance: float) -> bool:
        """Whether the 95 % interval excludes every change up to the tolerance."""
        return (self.low or 0.0) > 1.0 + tolerance or (self.high or math.inf) < 1.0 / (1.0 + tolerance)

    def verdict(self, tolerance: float, row_count: int) -> Verdict:
        """`same` where the 90 % interval lies within the tolerance, `larger` or `smaller` where p is below 5 % over all
        rows that are tested together; else, and with fewer than three processes on a side, `undecided`."""
        is_same = self.lies_within(tolerance)
        is_told = self.p is not None and self.p * row_count < 1 - CONFIDENCE
        if min(self.n_a, self.n_b) < MIN_REPEATS or not (is_told or is_same):
            return "undecided"
        if is_same:
            return "same"
        return "larger" if self.point > 1 else "smaller"


def ratio_of(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """The ratio B over A, each value the mean of one process.

    The intervals are Welch's for the difference of the mean logarithms (Biometrika 34, 1947, with the degrees of
    freedom of Satterthwaite 1946), as `scipy.stats.ttest_ind` computes them. Without spread on both sides the
    intervals are the ratio itself. Raises ValueError for an empty side and for a value not above 0.
    """
    logs_a, logs_b = logs_of(a), logs_of(b)
    difference = float(logs_b.mean() - logs_a.mean())
    std_a, std_b = std_of_logs(logs_a), std_of_logs(logs_b)
    if std_a is None or std_b is None:
        return Ratio(ratio_from(difference), None, None, None, len(a), len(b), std_a, std_b, None, None)
    variance_a, variance_b = std_a**2 / len(a), std_b**2 / len(b)
    error, freedom, p = math.sqrt(variance_a + variance_b), 1.0, float(abs(difference) < EQUAL)
    if error:
        freedom = error**4 / (variance_a**2 / (len(a) - 1) + variance_b**2 / (len(b) - 1))
        p = 2.0 * float(scipy.special.stdtr(freedom, -abs(difference) / error))
    halves = [student_quantile(freedom, confidence) * error for confidence in (CONFIDENCE, EQUIVALENCE_CONFIDENCE)]
    low, high, equal_low, equal_high = (ratio_from(difference + sign * half) for half in halves for sign in (-1, 1))
    return Ratio(ratio_from(difference), low, high, p, len(a), len(b), std_a, std_b, equal_low, equal_high)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values after Holm's correction, in the given order: at most 5 % that any false one falls below 0.05.

    The k-th smallest of m values is multiplied by m - k + 1, and raised to the corrected value of each smaller one
    (sequential rejection: Holm, Scandinavian Journal of Statistics 6, 1979).
    """
    adjusted, scaled = np.empty(len(p_values)), np.sort(p_values) * np.arange(len(p_values), 0, -1)
    adjusted[np.argsort(p_values, kind="stable")] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return list(map(float, adjusted))


def detectable_fraction(std: float, repeats: int) -> float:
    """The change that a two-sided test of two sides with `repeats` processes each finds in 95 % of cases.

    `std` is the standard deviation of the logarithms of process means. The change is the sum of two quantiles of
    Student's t (Cohen, Statistical Power Analysis, 1988, section 2.4) times the standard error.

    The degrees of freedom are those of Welch's formula, (n - 1) / (u^2 + (1 - u)^2), where u is the share of one side
    in the squared error. For two sides of n processes with the same spread, u is Beta((n - 1) / 2, (n - 1) / 2): its
    mean is 1/2, its variance 1 / (4 n). The mean of the denominator is taken.
    """
    freedom = 2.0 * (repeats - 1) * repeats / (repeats + 1)
    quantiles = student_quantile(freedom) + student_quantile(freedom, 2 * CONFIDENCE - 1)
    return ratio_from(quantiles * std * math.sqrt(2.0 / repeats)) - 1


def ratio_from(log: float) -> float:
    """The ratio whose logarithm is given; infinite where it is above the largest float."""
    with np.errstate(over="ignore"):
        return float(np.exp(log))


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(logs_of(values).mean())


def have_logs(values: Sequence[float]) -> bool:
    """Whether there are values, and all are finite and above 0."""
    return len(values) > 0 and all(0 < value < math.inf for value in values)


def logs_of(values: Sequence[float]) -> Floats:
    """The logarithms of values. Raises ValueError for no value at all, and for one not finite or not above 0."""
    if not have_logs(values):
        raise ValueError("a ratio takes values above 0 on both sides")
    logs: Floats = np.log(np.asarray(values, dtype=float))
    return logs


def std_of_logs(logs: Floats) -> float | None:
    """The standard deviation of logarithms, None below two of them; 0 where they differ only by rounding."""
    if logs.size < 2:
        return None
    std = float(logs.std(ddof=1))
    return std if std > EQUAL else 0.0


def pooled_std(groups: Sequence[Floats]) -> tuple[float, int]:
    """The standard deviation within groups, pooled over all of them (0 without degrees of freedom), and its degrees
    of freedom."""
    freedom = sum(group.size - 1 for group in groups)
    squares = math.fsum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    return math.sqrt(squares / freedom) if freedom else 0.0, freedom


#: Each further level must reduce the squared error by this times the noise variance times the logarithm of the number
#: of points. In simulated normal noise without a change (4 to 50 points) at most 5 % of the series then show one.
_PENALTY = 6.0


@dataclass(frozen=True)
class LevelChange:
    """A level change: from this index on, values are `point` times the level before. `low` and `high` are the 95 %
    interval of that ratio."""

    index: int
    point: float
    low: float
    high: float


def level_changes(values: Sequence[float]) -> list[LevelChange]:
    """The level changes in a series of positive values, whose logarithms are constant levels plus noise of one spread.

    Candidates are the borders of the best segmentation by least squares with a penalty for each level (Jackson et al.,
    An algorithm for optimal partitioning, 2005; ruptures' Pelt with model l2 and asv's step detection solve the same
    problem). The noise comes from the median absolute difference of successive values. Where most values equal the one
    before, as peaks of memory do, that median is 0, and the root mean square of all differences but the largest, which
    may be the change, replaces it. Student's t test compares the two levels beside a candidate, with the spread pooled
    over all levels. The candidate stays if p is below 5 % after Bonferroni's correction over all positions. Fewer than
    four points show no change.

    A single value further than four standard deviations from the median of itself and its neighbours is replaced by
    that median first: one of +30 % in 20 at 1 % noise would be a change in 59 % of series. The last value stays.
    """
    logs = logs_of(values)
    if logs.size < 4:
        return []
    steps = np.sort(np.abs(np.diff(logs)))
    noise = (STD_PER_MAD * float(np.median(steps)) or float(np.sqrt(np.mean(steps[:-1] ** 2)))) / math.sqrt(2)
    smooth = scipy.ndimage.median_filter(logs, 3, mode="mirror")
    logs[:-1] = np.where(np.abs(logs - smooth) > 4 * noise + EQUAL, smooth, logs)[:-1]
    borders = _best_borders(logs, _PENALTY * math.log(logs.size) * max(noise, EQUAL) ** 2)
    while borders:
        levels = np.split(logs, borders)
        std, freedom = pooled_std(levels)
        changes = np.diff([level.mean() for level in levels])
        errors = max(EQUAL, std) * np.sqrt([1 / a.size + 1 / b.size for a, b in pairwise(levels)])
        t_values = np.abs(changes) / errors
        weakest = int(t_values.argmin())
        if 2 * scipy.special.stdtr(freedom, -t_values[weakest]) * (logs.size - 1) < 1 - CONFIDENCE:
            quantile = student_quantile(freedom)
            return [
                LevelChange(border, *(ratio_from(change + sign * quantile * error) for sign in (0, -1, 1)))
                for border, change, error in zip(borders, changes, errors, strict=True)
            ]
        borders.pop(weakest)
    return []


def _best_borders(values: Floats, penalty: float) -> list[int]:
    """The indices at which the levels of the best segmentation begin, without the first level.

    Only the last level may have a single point: one point that stands out from a level is an outlier, not two changes.
    """
    sums, squares = (np.concatenate([[0.0], np.cumsum(terms)]) for terms in (values, values**2))
    # costs[n]: the least cost of the first n points; begins[n]: where their last level begins.
    costs, begins = [-penalty, math.inf], [0, 0]
    for end in range(2, values.size + 1):
        starts = np.arange(end if end == values.size else end - 1)
        residues = squares[end] - squares[starts] - (sums[end] - sums[starts]) ** 2 / (end - starts)
        totals = np.array(costs)[starts] + np.maximum(residues, 0.0) + penalty
        begins.append(int(totals.argmin()))
        costs.append(float(totals.min()))
    borders = [begins[values.size]]
    while borders[0]:
        borders.insert(0, begins[borders[0]])
    return borders[1:]
