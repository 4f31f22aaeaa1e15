"""Where the level of a series changes: over revisions, or over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import scipy  # type: ignore[import-untyped]

from lmbench.records.statistics import CONFIDENCE, EQUAL, STD_PER_MAD, Floats, logs_of, ratio_from

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
    noise = STD_PER_MAD * float(np.median(np.abs(np.diff(logs)))) / math.sqrt(2) if logs.size > 3 else 0.0
    borders = _best_borders(logs, _PENALTY * math.log(logs.size) * max(noise, EQUAL) ** 2) if logs.size > 3 else []
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
            reach = float(scipy.special.stdtrit(freedom, 0.5 + CONFIDENCE / 2))
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
