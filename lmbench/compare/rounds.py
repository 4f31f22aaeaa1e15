"""The ratio of two sides that were measured in turn, round by round, and looked at after every round.

What a look may rest on is the difference of the logarithms of a round's two step times. Whatever both have in common
(drift from round to round, a clock that changed, the server's hash seed) is not in it. The evidence against "the
typical difference is m" is an e-value, a bet that cannot be expected to win where m is true; over all looks together it
exceeds 1 / alpha with probability alpha at most (Ville 1939), however and whenever one stops, or goes on later. It is
the mean of two bets:

- on Student's t: the ratio of the likelihood of t, effects in units of the spread being N(0, g), to that without
  effect (Lai, Annals of Statistics 4, 1976; Gönen et al., The American Statistician 59, 2005; that it may be looked at
  at every n: Perez-Ortiz et al., Annals of Statistics 52, 2024). Strong where differences are normal.
- on signs: each difference from m is a fair coin where they are symmetric about it, which order and noise of any shape
  make them, since both sides are alike then. The stakes are some fractions of what is left (Kelly 1956), and none on a
  difference that is more than `_FAR` times the median so far: that depends on its size alone, so the coin stays fair. A
  slow process of five leaves this bet as it was.

Of 10 000 simulated comparisons each, 60 rounds, gate 1 % (`python tests/experiments/simulated_rounds.py`; `false` are
`faster` and `slower` together, `rounds` the median until the verdict):

                                A/A: false  same in 20  in 60  rounds   +2 %: found in 20  in 60  rounds
    spread 0.3 %                      0.1%       99.9%  99.9%       5             100.0% 100.0%       5
    spread 0.5 %                      0.9%       98.7%  99.1%       9             100.0% 100.0%       6
    spread 1 %                        2.9%       18.6%  95.3%      29              99.1% 100.0%       8
    spread 2 %                        3.0%        0.1%   1.8%      60              45.3%  97.9%      22
    spread 3 %                        3.0%        0.0%   0.0%      60              18.1%  64.9%      47
    0.5 %, drift 1 % a round          0.4%       95.0%  99.6%      12             100.0% 100.0%       6
    0.3 %, two clocks, 2 %            2.7%       10.8%  94.1%      32              98.9%  99.9%       9
    0.3 %, two clocks, 5 %            2.5%        9.7%  61.6%      53              31.1%  89.0%      30
    0.3 %, clock by round, 5 %        0.1%       99.9%  99.9%       5             100.0% 100.0%       5
    0.5 %, 1 in 5 slow by 5 %         1.6%       23.4%  86.6%      34              63.2%  99.5%      16
    0.5 %, 1 in 5 slow by 10 %        1.3%       43.1%  98.1%      23              65.3%  99.0%      16
    1 %, 1 in 5 slow by 30 %          1.9%        1.8%  38.4%      60              53.5%  99.3%      20

Within 200 rounds 2 % more are found in more than 99.8 % under each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmbench.compare.verdict import FIRST_LOOK
from lmbench.records.welch import (
    CONFIDENCE,
    EQUIVALENCE_CONFIDENCE,
    POWER,
    STD_PER_MAD,
    Ratio,
    ratio_from,
    std_of_logs,
)

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

#: Variance of the effect that Student's bet expects, in units of a difference's: best near 5 to 30 rounds.
_G = 2.0
_STAKES = (0.4, 0.7, 0.95)
_FAR = 3.0
_GRID = 101
#: Differences whose spread is below this are equal but for rounding.
_EQUAL = 1e-12
_RESAMPLES = 200
_MOST = 200


@dataclass(frozen=True)
class RoundsRatio(Ratio):
    """A ratio with the differences of logarithms that it comes from, a round each."""

    differences: tuple[float, ...] = ()

    @property
    def is_by_rounds(self) -> bool:
        return True

    def needed(self, tolerance: float) -> int | None:
        """Rounds, all together, see `rounds_needed`."""
        return rounds_needed(self.differences, tolerance)

    def lies_within(self, tolerance: float) -> bool:
        return len(self.differences) >= FIRST_LOOK and bool(looks(np.array(self.differences), tolerance).same[-1])


@dataclass(frozen=True)
class Looks:
    """What a look after each round finds: evidence of a change, or of less than the tolerance."""

    changed: Flags
    same: Flags


def log_evidence(differences: Floats) -> Floats:
    """The logarithm of the evidence against "no difference" after each round (the last axis)."""
    return np.logaddexp(_student(differences), _signs(differences)) - math.log(2)


def looks(differences: Floats, tolerance: float) -> Looks:
    """What each look along the last axis finds.

    `same` are two one-sided tests at 5 % each: there is evidence of 1 / 0.1 against either end of the tolerance, both
    directions of which share 0.1, and the median lies between them. It comes first.
    """
    limit = math.log1p(tolerance)
    medians = np.stack([np.median(differences[..., : n + 1], axis=-1) for n in range(differences.shape[-1])], axis=-1)
    enough = -math.log(1 - EQUIVALENCE_CONFIDENCE)
    ends = [log_evidence(differences - end) >= enough for end in (-limit, limit)]
    same = ends[0] & ends[1] & (np.abs(medians) < limit)
    changed = (log_evidence(differences) >= -math.log(1 - CONFIDENCE)) & ~same
    same[..., : FIRST_LOOK - 1] = False
    changed[..., : FIRST_LOOK - 1] = False
    return Looks(changed, same)


def _student(x: Floats) -> Floats:
    n = np.arange(1, x.shape[-1] + 1)
    total, squares = np.cumsum(x, axis=-1), np.cumsum(x * x, axis=-1)
    # t^2 / (n - 1 + t^2); differences that are all 0 say nothing against 0.
    share = np.divide(total * total, n * squares, out=np.zeros_like(x), where=squares > 0)
    evidence: Floats = -0.5 * np.log1p(n * _G) - n / 2 * np.log1p(-np.minimum(share, 1.0) * n * _G / (1 + n * _G))
    return evidence


def _signs(x: Floats) -> Floats:
    size = np.abs(x)
    usual = np.stack([np.median(size[..., : n + 1], axis=-1) for n in range(x.shape[-1])], axis=-1)
    coins = np.sign(x) * (size <= _FAR * usual)
    bets = [np.cumsum(np.log1p(side * stake * coins), axis=-1) for stake in _STAKES for side in (1, -1)]
    evidence: Floats = np.logaddexp.reduce(bets, axis=0) - math.log(len(bets))
    return evidence


def ratio_by_rounds(a: Sequence[float], b: Sequence[float]) -> RoundsRatio:
    """B over A, value by value of the same round.

    The intervals are what no evidence of 20 (95 %) or 10 (90 %) is against, None while that is everything; `p` is the
    inverse of the evidence against a ratio of 1. The ratio is where there is the least. Where the differences have no
    spread it is the ratio itself.
    """
    logs_a, logs_b = ([math.log(value) for value in side] for side in (a, b))
    differences = np.array(logs_b) - np.array(logs_a)
    std_a, std_b = std_of_logs(logs_a), std_of_logs(logs_b)
    found = tuple(differences.tolist())
    n, middle = len(found), float(np.mean(differences))
    if n < 2:
        return RoundsRatio(ratio_from(middle), None, None, None, n, n, std_a, std_b, None, None, found)
    if float(np.std(differences)) < _EQUAL:
        ratio, p = ratio_from(middle), 1.0 if abs(middle) < _EQUAL else 0.0
        return RoundsRatio(ratio, ratio, ratio, p, n, n, std_a, std_b, ratio, ratio, found)
    p = min(1.0, math.exp(-float(log_evidence(differences)[-1])))
    middle = _least_evidence(differences)
    low, high = _interval(differences, middle, CONFIDENCE)
    equal_low, equal_high = _interval(differences, middle, EQUIVALENCE_CONFIDENCE)
    return RoundsRatio(ratio_from(middle), low, high, p, n, n, std_a, std_b, equal_low, equal_high, found)


def _against(differences: Floats, points: Floats) -> Floats:
    """The evidence after the last round against each of the points."""
    return log_evidence(differences - points[:, None])[:, -1]


def _least_evidence(differences: Floats) -> float:
    low, high = float(np.min(differences)), float(np.max(differences))
    for _ in range(2):
        points = np.linspace(low, high, _GRID)
        best = float(points[np.argmin(_against(differences, points))])
        step = float(points[1] - points[0])
        low, high = best - step, best + step
    return best


def _interval(differences: Floats, middle: float, confidence: float) -> tuple[float | None, float | None]:
    """The ratios around the one of least evidence that have less than 1 / (1 - confidence) against them; None without
    such ends.

    What is beyond the first that has more goes with it: evidence that a difference lies below m is evidence against all
    that is above m.
    """
    n = differences.size
    # Student's half alone has twice that beyond these (solved for t): the ends lie within.
    at_most, whole = (2 * math.sqrt(1 + n * _G) / (1 - confidence)) ** (2 / n), 1 + n * _G
    if at_most >= whole:
        return None, None
    reach = math.sqrt((at_most - 1) / (1 - at_most / whole)) * float(np.std(differences))
    mean = float(np.mean(differences))
    ends = []
    for end in (mean - reach, mean + reach):
        inside, outside = middle, end
        for _ in range(2):
            points = np.linspace(inside, outside, _GRID)
            beyond = _against(differences, points[1:]) >= -math.log(1 - confidence)
            first = int(np.argmax(beyond)) if beyond.any() else _GRID - 2
            inside, outside = float(points[first]), float(points[first + 1])
        ends.append(ratio_from(inside))
    return ends[0], ends[1]


def rounds_needed(differences: Sequence[float], tolerance: float) -> int | None:
    """Rounds, all together, after which 90 % of comparisons have a verdict where nothing changed; None above 200.

    By simulation: the rule itself on rounds drawn from those that were seen, about their median, with signs by chance,
    since both sides are alike then, and smoothed, since they are few (Silverman, Density Estimation, 1986, 3.31).
    Seeded: the same rounds give the same number.
    """
    seen = np.array(differences) - np.median(differences)
    spread = min(float(np.std(seen, ddof=1)), STD_PER_MAD * float(np.median(np.abs(seen))))
    generator, size = np.random.default_rng(0), (_RESAMPLES, _MOST)
    drawn = generator.choice(seen, size) * generator.choice([-1.0, 1.0], size)
    drawn += generator.normal(0.0, 0.9 * spread * seen.size**-0.2, size)
    for rounds in (25, 50, 100, _MOST):
        found = looks(drawn[:, :rounds], tolerance)
        reached = np.maximum.accumulate(found.changed | found.same, axis=-1).mean(axis=0) >= POWER
        if reached.any():
            return int(np.argmax(reached)) + 1
    return None
