"""Statistics of one series of values (design section 8), on the standard library alone but for Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

#: Confidence asked of the median's interval; the real coverage is stated beside it.
MEDIAN_CONFIDENCE = 0.95

#: Modified z-score of an outlier (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993).
OUTLIER_SCORE = 3.5

#: The trend is fitted to medians of at most so many blocks: all pairs of 10 000 steps would take seconds.
TREND_BLOCKS = 100


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Quantile of sorted values, linear between order statistics (type 7 of Hyndman and Fan 1996)."""
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def sample_std(values: Sequence[float], mean: float) -> float | None:
    """Standard deviation with n - 1, None below two values."""
    if len(values) < 2:
        return None
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the mean of independent values, such as the means of processes, by Student's t.

    Raises ValueError below two values, which have no spread.
    """
    # SciPy is imported only where an interval is shown: reading and summarizing do without it.
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    mean = statistics.fmean(values)
    std = sample_std(values, mean)
    if std is None:
        raise ValueError("an interval of the mean takes two values")
    half = float(stdtrit(len(values) - 1, 0.5 + confidence / 2)) * std / math.sqrt(len(values))
    return mean - half, mean + half


def median_interval(ordered: Sequence[float]) -> tuple[float, float, float] | None:
    """Order-statistic interval of the median of sorted values: (low, high, real coverage), None below six.

    The interval from the k-th smallest to the k-th largest value covers the median of independent draws with
    probability 1 - 2 P(B < k), B binomial(n, 1/2) (David and Nagaraja, Order Statistics, section 7.1). The
    largest k with at least 95 % is taken; below n = 6 there is none.
    """
    n = len(ordered)
    rank, coverage = _median_rank(n)
    return None if rank == 0 else (ordered[rank - 1], ordered[n - rank], coverage)


def _median_rank(n: int) -> tuple[int, float]:
    """The largest k whose interval covers enough, with its coverage; k = 0 if there is none."""
    tail = (1 - MEDIAN_CONFIDENCE) / 2
    # The normal approximation starts the search; a few exact steps from above finish it.
    rank = min(n // 2, math.ceil(n / 2 - 0.97998 * math.sqrt(n)) + 2)
    while rank > 0:
        below = _binomial_below(n, rank)
        if below <= tail:
            return rank, 1 - 2 * below
        rank -= 1
    return 0, 0.0


def _binomial_below(n: int, k: int) -> float:
    """P(B < k) for B binomial(n, 1/2), summed downwards from its largest term."""
    i = k - 1
    log_term = math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2)
    term = math.exp(log_term)
    total = 0.0
    while i >= 0 and term > total * 1e-17:
        total += term
        term *= i / (n - i + 1)
        i -= 1
    return total


def lag1_autocorrelation(values: Sequence[float], mean: float) -> float | None:
    """Correlation of each value with the next, None below three values or for a constant series."""
    square = math.fsum((value - mean) ** 2 for value in values)
    if len(values) < 3 or square == 0:
        return None
    return math.fsum((a - mean) * (b - mean) for a, b in pairwise(values)) / square


def outlier_count(values: Sequence[float], median: float) -> int:
    """Values whose modified z-score |x - median| / (1.4826 MAD) is over 3.5.

    Where more than half of the values are equal the MAD is 0; then 1.2533 times the mean absolute deviation
    takes its place (the same standard deviation for normal values), so that a coarse clock does not make
    outliers.
    """
    deviations = [abs(value - median) for value in values]
    scale = 1.4826 * statistics.median(deviations) or 1.2533 * statistics.fmean(deviations)
    return sum(deviation > OUTLIER_SCORE * scale for deviation in deviations)


def trend(values: Sequence[float]) -> tuple[float, float] | None:
    """Drift from the first to the last value, and the chance of such an order without one; None below six.

    The drift is that of a line whose slope is the median of the slopes between all pairs (Theil 1950, Sen 1968) and
    whose height is the median of what is left. A series that changes once has slopes that no line through it has; so
    the line begins within what the first half of the values spans, and ends within the span of the last half. The
    chance is the two-sided p of Kendall's S against time with the tie-corrected normal approximation (Mann 1945). Over
    100 values all is taken on the medians of 100 equal blocks.
    """
    if len(values) < 6:
        return None
    times, levels = _blocks(values)
    slopes, score = [], 0
    for i, (time, level) in enumerate(zip(times, levels, strict=True)):
        for later in range(i + 1, len(times)):
            rise = levels[later] - level
            slopes.append(rise / (times[later] - time))
            score += (rise > 0) - (rise < 0)
    slopes.sort()
    slope = quantile(slopes, 0.5)
    height = statistics.median(level - slope * time for time, level in zip(times, levels, strict=True))
    half = (len(levels) + 1) // 2
    first = _within(height, levels[:half])
    last = _within(height + slope * (len(values) - 1), levels[-half:])
    return last - first, _kendall_p(score, levels)


def _within(value: float, span: Sequence[float]) -> float:
    return min(max(value, min(span)), max(span))


def noise_fraction(values: Sequence[float]) -> float | None:
    """Standard deviation of each value about the next, as a fraction of the mean; None below six.

    From the successive differences (von Neumann 1941), which a drift does not widen. The largest tenth, two at least,
    are left out: a single outlier or change of level makes no noise.
    """
    if len(values) < 6:
        return None
    squares = sorted((later - earlier) ** 2 for earlier, later in pairwise(values))
    kept = squares[: len(squares) - max(2, math.ceil(len(squares) / 10))]
    return math.sqrt(statistics.fmean(kept) / 2) / statistics.fmean(values)


def mean_error_fraction(values: Sequence[float]) -> float:
    """Half the 95 % interval of the mean, as a fraction of it, of values each of which is like the one before.

    Student's t on as many independent values as have the same information, (1 - r) / (1 + r) of them, r the lag-1
    autocorrelation of a first-order process (Bayley and Hammersley 1946). Two at least, as an interval takes.
    """
    from scipy.special import stdtrit

    mean, n = statistics.fmean(values), len(values)
    alike = max(0.0, lag1_autocorrelation(values, mean) or 0.0)
    independent = max(2.0, n * (1 - alike) / (1 + alike))
    std = sample_std(values, mean) or 0.0
    return float(stdtrit(independent - 1, 0.975)) * std / math.sqrt(independent) / mean


def _blocks(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Middle index and median of at most TREND_BLOCKS contiguous, near equal blocks."""
    count = min(len(values), TREND_BLOCKS)
    edges = [round(block * len(values) / count) for block in range(count + 1)]
    spans = list(pairwise(edges))
    times = [(start + end - 1) / 2 for start, end in spans]
    return times, [statistics.median(values[start:end]) for start, end in spans]


def _kendall_p(score: int, levels: Sequence[float]) -> float:
    n = len(levels)
    ties: dict[float, int] = {}
    for level in levels:
        ties[level] = ties.get(level, 0) + 1
    correction = sum(t * (t - 1) * (2 * t + 5) for t in ties.values())
    variance = (n * (n - 1) * (2 * n + 5) - correction) / 18
    return 1.0 if variance <= 0 else math.erfc(abs(score) / math.sqrt(2 * variance))
