"""Statistics of one series of values, the ratio of two groups of processes, and where the level of a series changes.

NumPy and SciPy do the work. `import scipy` alone takes 20 ms; its submodules load at their first use (0.3 s for
`special`, 0.9 s for `stats`, which Lightning has loaded before a run ends), so what only reads results waits for none.
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

Floats = npt.NDArray[np.float64]
Verdict = Literal["same", "larger", "smaller", "undecided"]

CONFIDENCE = 0.95
#: Of the interval that has to lie within a tolerance: two one-sided tests at 5 % each (Schuirmann, Journal of
#: Pharmacokinetics and Biopharmaceutics 15, 1987).
EQUIVALENCE_CONFIDENCE = 0.90
#: Fewer processes than this on a side decide nothing.
MIN_REPEATS = 3
#: The standard deviation of normal values over their median absolute deviation.
STD_PER_MAD = 1.4826
#: Modified z-score of an outlier (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993).
OUTLIER_SCORE = 3.5
#: The trend is fitted to medians of at most so many blocks: all pairs of 10 000 steps would take seconds.
TREND_BLOCKS = 100
#: Logarithms whose spread is below this are equal but for rounding (peaks of memory often are).
EQUAL = 1e-12


def sample_std(values: Sequence[float]) -> float | None:
    """Standard deviation with n - 1, None below two values."""
    # Exactly 0 where all values are one.
    return float(np.std(np.asarray(values) - statistics.fmean(values), ddof=1)) if len(values) > 1 else None


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of independent values, such as the means of processes, by Student's t.

    Raises ValueError below two values, which have no spread.
    """
    mean, std = statistics.fmean(values), sample_std(values)
    if std is None:
        raise ValueError("an interval of the mean takes two values")
    half = _student(len(values) - 1, CONFIDENCE) * std / math.sqrt(len(values))
    return mean - half, mean + half


def _student(freedom: float, confidence: float) -> float:
    """Student's t that a two-sided interval reaches to."""
    return float(scipy.special.stdtrit(freedom, 0.5 + confidence / 2))


def median_interval(ordered: Sequence[float]) -> tuple[float, float, float] | None:
    """Order-statistic interval of the median of sorted values: (low, high, real coverage), None below six.

    The interval from the k-th smallest to the k-th largest value covers the median of independent draws with
    probability 1 - 2 P(B < k), B binomial(n, 1/2) (David and Nagaraja, Order Statistics, section 7.1). The
    largest k with at least 95 % is taken; below n = 6 there is none.
    """
    n = len(ordered)
    if n < 6:
        return None
    rank = int(scipy.special.bdtrik((1 - CONFIDENCE) / 2, n, 0.5)) + 1
    return ordered[rank - 1], ordered[n - rank], 1 - 2 * float(scipy.special.bdtr(rank - 1, n, 0.5))


def lag1_autocorrelation(values: Sequence[float] | Floats) -> float | None:
    """Correlation of each value with the next, None below three values or for a constant series."""
    deviations = np.asarray(values) - statistics.fmean(values)
    square = float(deviations @ deviations)
    return float(deviations[:-1] @ deviations[1:]) / square if len(values) > 2 and square else None


def outlier_count(values: Sequence[float], median: float) -> int:
    """Values whose modified z-score |x - median| / (1.4826 MAD) is over 3.5.

    Where more than half of the values are equal the MAD is 0; then 1.2533 times the mean absolute deviation
    takes its place (the same standard deviation for normal values), so that a coarse clock does not make
    outliers.
    """
    deviations = np.abs(np.asarray(values) - median)
    scale = STD_PER_MAD * np.median(deviations) or 1.2533 * deviations.mean()
    return int((deviations > OUTLIER_SCORE * scale).sum())


def trend(values: Sequence[float]) -> tuple[float, float] | None:
    """Drift from the first to the last value as a fraction of the first, and the chance of such an order without one;
    None below six.

    The drift is that of Theil and Sen's line (Theil 1950, Sen 1968), whose ends are clamped to the range of each half
    of the values, so that one level shift is not extrapolated. The chance is the two-sided p of Kendall's S against
    time with the tie-corrected normal approximation (Mann 1945). Over 100 values all is taken on medians of 100 blocks.
    """
    n = len(values)
    if n < 6:
        return None
    blocks = np.array_split(np.asarray(values), min(n, TREND_BLOCKS))
    ends = np.cumsum([block.size for block in blocks])
    times = ends - np.array([block.size + 1 for block in blocks]) / 2
    levels = np.array([np.median(block) for block in blocks])
    line = scipy.stats.theilslopes(levels, times, method="joint")
    half = (levels.size + 1) // 2
    first = np.clip(line.intercept, levels[:half].min(), levels[:half].max())
    last = np.clip(line.intercept + line.slope * (n - 1), levels[-half:].min(), levels[-half:].max())
    chance = scipy.stats.kendalltau(times, levels, method="asymptotic").pvalue
    return float(last / first - 1) if first > 0 else 0.0, 1.0 if math.isnan(chance) else float(chance)


@dataclass(frozen=True)
class Ratio:
    """How many times A's value B's is, from the geometric means of both sides; one process is one sample.

    `low` and `high` are the ends of the 95 % interval, `equal_low` and `equal_high` those of the 90 % interval, `p` is
    two-sided for a ratio of 1; None with fewer than two values on a side. `std_a` and `std_b` are standard deviations
    of logarithms, which for a spread of a few percent is the spread as a fraction.
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
    #: Differences of logarithms of sides that were measured in turn, a round each; empty where they were not.
    differences: tuple[float, ...] = ()
    #: Autocorrelations over rounds of A, of B and of the differences, where these are not independent.
    persistence: tuple[float, ...] = ()

    @property
    def change(self) -> float:
        """The change from A to B as a fraction: 0.02 is 2 % more."""
        return self.point - 1.0

    @property
    def excludes_one(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 1.0 or self.high < 1.0)

    def lies_within(self, tolerance: float) -> bool:
        """Whether the ratio does, from 1 / (1 + tolerance) to 1 + tolerance, by two one-sided tests at 5 %: whether
        the whole 90 % interval does."""
        if self.equal_low is None or self.equal_high is None:
            return False
        return self.equal_low >= 1.0 / (1.0 + tolerance) and self.equal_high <= 1.0 + tolerance

    def verdict(self, tolerance: float) -> Verdict:
        """`same` where the 90 % interval lies within the tolerance, `larger` or `smaller` where the 95 % interval
        excludes 1, else `undecided`, as with fewer than three processes on a side."""
        if min(self.n_a, self.n_b) < MIN_REPEATS or not (self.excludes_one or self.lies_within(tolerance)):
            return "undecided"
        return "same" if self.lies_within(tolerance) else "larger" if self.point > 1 else "smaller"


def ratio_of(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """B over A, each value the mean of one process.

    The interval is Welch's (Biometrika 34, 1947, with the degrees of freedom of Satterthwaite 1946) for the
    difference of the mean logarithms, as `scipy.stats.ttest_ind` has it. Where the values of both sides have no spread
    it is the ratio itself. Raises ValueError for an empty side or a value that is not above 0.
    """
    logs_a, logs_b = logs_of(a), logs_of(b)
    difference = float(logs_b.mean() - logs_a.mean())
    std_a, std_b = std_of_logs(logs_a), std_of_logs(logs_b)
    if std_a is None or std_b is None:
        return Ratio(ratio_from(difference), None, None, None, len(a), len(b), std_a, std_b, None, None)
    part_a, part_b = std_a**2 / len(a), std_b**2 / len(b)
    error, freedom, p = math.sqrt(part_a + part_b), 1.0, float(abs(difference) < EQUAL)
    if error:
        freedom = error**4 / (part_a**2 / (len(a) - 1) + part_b**2 / (len(b) - 1))
        p = 2.0 * float(scipy.special.stdtr(freedom, -abs(difference) / error))
    halves = [_student(freedom, confidence) * error for confidence in (CONFIDENCE, EQUIVALENCE_CONFIDENCE)]
    low, high, equal_low, equal_high = (ratio_from(difference + sign * half) for half in halves for sign in (-1, 1))
    return Ratio(ratio_from(difference), low, high, p, len(a), len(b), std_a, std_b, equal_low, equal_high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order given: below 0.05 with at most 5 % for any false one among them.

    Sequential rejection (Holm, Scandinavian Journal of Statistics 6, 1979): the k-th smallest of m is multiplied by
    m - k + 1, and no adjusted value is below that of a smaller p.
    """
    adjusted, scaled = np.empty(len(p_values)), np.sort(p_values) * np.arange(len(p_values), 0, -1)
    adjusted[np.argsort(p_values, kind="stable")] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return list(map(float, adjusted))


def detectable_fraction(std: float, repeats: int) -> float:
    """The change that two sides of `repeats` processes each tell from none in 95 % of cases.

    `std` is that of the logarithms of process means. By the usual sum of two quantiles of Student's t for a
    two-sided test (Cohen, Statistical Power Analysis, 1988, section 2.4), with Welch's degrees of freedom to expect of
    two sides with one spread: with u the share of one side's squared error they are (n - 1) / (u^2 + (1 - u)^2), and u
    has mean 1/2 and variance 1 / (4 n), being Beta((n - 1) / 2, (n - 1) / 2).
    """
    freedom = 2.0 * (repeats - 1) * repeats / (repeats + 1)
    quantiles = _student(freedom, CONFIDENCE) + _student(freedom, 2 * CONFIDENCE - 1)
    return ratio_from(quantiles * std * math.sqrt(2.0 / repeats)) - 1


def ratio_from(log: float) -> float:
    """The ratio that a difference of logarithms is; infinite where no float is so large."""
    with np.errstate(over="ignore"):
        return float(np.exp(log))


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(logs_of(values).mean())


def logs_of(values: Sequence[float]) -> Floats:
    """Their logarithms. Raises ValueError for no value, or one that is not above 0."""
    array = np.asarray(values, dtype=float)
    if not array.size or not ((array > 0) & np.isfinite(array)).all():
        raise ValueError("a ratio takes values above 0 on both sides")
    logs: Floats = np.log(array)
    return logs


def std_of_logs(logs: Floats) -> float | None:
    """Their standard deviation, None for fewer than two; 0 where they are equal but for rounding."""
    if logs.size < 2:
        return None
    std = float(logs.std(ddof=1))
    return std if std > EQUAL else 0.0


#: What a further level has to gain, in variances of the noise times the logarithm of the number of points. Simulated on
#: normal noise without a change (4 to 50 points): 5 % of the series or fewer show one.
_PENALTY = 6.0


@dataclass(frozen=True)
class LevelChange:
    """From the point of this index on values are `point` times those of the level before, with its 95 % interval."""

    index: int
    point: float
    low: float
    high: float


def level_changes(values: Sequence[float]) -> list[LevelChange]:
    """The change points of a series of positive values, which are logarithms' constant levels plus noise of one spread.

    Candidates are the best segmentation by least squares with a penalty for each level (Jackson and others, An
    algorithm for optimal partitioning, 2005; what ruptures' Pelt with model l2 and asv's step detection solve), the
    noise that of successive differences by their median. A candidate stays if Student's t of the two levels that it
    parts, with the spread within all levels, is below 5 % after Bonferroni's correction over all places. Fewer than
    four points show none.
    """
    logs = logs_of(values)
    if logs.size < 4:
        return []
    noise = STD_PER_MAD * float(np.median(np.abs(np.diff(logs)))) / math.sqrt(2)
    borders = _best_borders(logs, _PENALTY * math.log(logs.size) * max(noise, EQUAL) ** 2)
    while borders:
        levels = np.split(logs, borders)
        freedom = logs.size - len(levels)
        squares = math.fsum(float(((level - level.mean()) ** 2).sum()) for level in levels)
        spread = max(EQUAL, math.sqrt(squares / freedom)) if freedom else math.inf
        changes = [float(after.mean() - before.mean()) for before, after in pairwise(levels)]
        errors = [spread * math.sqrt(1 / a.size + 1 / b.size) for a, b in pairwise(levels)]
        ratios = [abs(change) / error for change, error in zip(changes, errors, strict=True)]
        weakest = int(np.argmin(ratios))
        if freedom and 2 * scipy.special.stdtr(freedom, -ratios[weakest]) * (logs.size - 1) < 1 - CONFIDENCE:
            reach = _student(freedom, CONFIDENCE)
            return [
                LevelChange(border, *(ratio_from(change + sign * reach * error) for sign in (0, -1, 1)))
                for border, change, error in zip(borders, changes, errors, strict=True)
            ]
        borders.pop(weakest)
    return []


def _best_borders(values: Floats, penalty: float) -> list[int]:
    """Where the levels of the best segmentation begin, without the first. Only the last may be of a single point: one
    measurement that stands out between others of one level is an outlier, and no two changes."""
    sums, squares = (np.concatenate([[0.0], np.cumsum(terms)]) for terms in (values, values**2))
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
