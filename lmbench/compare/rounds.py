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

from lmbench.records.statistics import (
    CONFIDENCE,
    EQUAL,
    EQUIVALENCE_CONFIDENCE,
    POWER,
    STD_PER_MAD,
    Floats,
    Ratio,
    logs_of,
    ratio_from,
    std_of_logs,
)

#: Rounds after which the first look may decide.
FIRST_LOOK = 4
#: Variance of the effect that Student's bet expects, in units of a difference's: best near 5 to 30 rounds.
_G = 2.0
_STAKES = np.array([-0.95, -0.7, -0.4, 0.4, 0.7, 0.95])
_FAR = 3.0
_GRID = 1001
_RESAMPLES = 200
_MAX_ROUNDS = 200


@dataclass(frozen=True)
class RoundsRatio(Ratio):
    """A ratio of sides that were measured in turn, judged by the evidence of its rounds."""

    def lies_within(self, tolerance: float) -> bool:
        return self.n_a >= FIRST_LOOK and bool(looks(np.array(self.differences), tolerance).same[-1])

    def needed(self, tolerance: float) -> int | None:
        """Rounds, all together, see `rounds_needed`."""
        return rounds_needed(self.differences, tolerance)


@dataclass(frozen=True)
class Looks:
    """What a look after each round finds: evidence of a change, or of less than the tolerance."""

    changed: npt.NDArray[np.bool_]
    same: npt.NDArray[np.bool_]


def looks(differences: Floats, tolerance: float) -> Looks:
    """What each look along the last axis finds.

    `same` are two one-sided tests at 5 % each: there is evidence of 1 / 0.1 against either end of the tolerance, both
    directions of which share 0.1, and the median lies between them. It comes first.
    """
    limit = math.log1p(tolerance)
    enough = np.arange(1, differences.shape[-1] + 1) >= FIRST_LOOK
    same = enough & (np.abs(_medians(differences)) < limit)
    for end in (-limit, limit):
        same &= log_evidence(differences - end) >= _threshold(EQUIVALENCE_CONFIDENCE)
    return Looks(enough & ~same & (log_evidence(differences) >= _threshold(CONFIDENCE)), same)


def _threshold(confidence: float) -> float:
    """The logarithm of the evidence that a comparison without a change exceeds as rarely as the confidence says."""
    return -math.log(1 - confidence)


def log_evidence(differences: Floats) -> Floats:
    """The logarithm of the evidence against "no difference" after each round (the last axis)."""
    x = differences
    n = np.arange(1, x.shape[-1] + 1)
    squares = np.cumsum(x * x, axis=-1)
    # t^2 / (n - 1 + t^2); differences that are all 0 say nothing against 0.
    share = np.divide(np.cumsum(x, axis=-1) ** 2, n * squares, out=np.zeros_like(x), where=squares > 0)
    student = -0.5 * np.log1p(n * _G) - n / 2 * np.log1p(-np.minimum(share, 1.0) * n * _G / (1 + n * _G))
    coins = np.sign(x) * (np.abs(x) <= _FAR * _medians(np.abs(x)))
    bets = np.cumsum(np.log1p(np.multiply.outer(_STAKES, coins)), axis=-1)
    signs = np.logaddexp.reduce(bets, axis=0) - math.log(len(_STAKES))
    evidence: Floats = np.logaddexp(student, signs) - math.log(2)
    return evidence


def _medians(x: Floats) -> Floats:
    """The median of the first n values along the last axis, for every n."""
    return np.stack([np.median(x[..., : n + 1], axis=-1) for n in range(x.shape[-1])], axis=-1)


def ratio_by_rounds(a: Sequence[float], b: Sequence[float]) -> RoundsRatio:
    """B over A, value by value of the same round.

    The ratio is where there is the least evidence. The intervals are what lies around it without evidence of 20 (95 %)
    or 10 (90 %) against it, None while that is everything; `p` is the inverse of the evidence against a ratio of 1.
    What is beyond the first point that has more goes with it: evidence that a difference lies below m is evidence
    against all that is above m. Where the differences have no spread the ratio and its intervals are one.
    """
    logs_a, logs_b = logs_of(a), logs_of(b)
    differences: Floats = logs_b - logs_a
    n, mean, std = differences.size, float(differences.mean()), float(differences.std())
    std_a, std_b = std_of_logs(logs_a), std_of_logs(logs_b)
    if n < 2 or std < EQUAL:
        point = ratio_from(mean)
        end, p = (point, float(abs(mean) < EQUAL)) if n > 1 else (None, None)
        return RoundsRatio(point, end, end, p, n, n, std_a, std_b, end, end, tuple(differences.tolist()))
    # Student's half alone has twice the evidence that is allowed beyond these (solved for t): the ends lie within.
    largest = 1 + n * _G
    shares = [
        (2 * math.sqrt(largest) / (1 - confidence)) ** (2 / n) for confidence in (CONFIDENCE, EQUIVALENCE_CONFIDENCE)
    ]
    reaches = [std * math.sqrt((share - 1) / (1 - share / largest)) if share < largest else 0.0 for share in shares]
    low, high = min(mean - reaches[0], differences.min()), max(mean + reaches[0], differences.max())
    points = np.linspace(low, high, _GRID)
    evidence = log_evidence(differences - points[:, None])[:, -1]
    best = int(np.argmin(evidence))

    def interval(reach: float, confidence: float) -> tuple[float | None, float | None]:
        if not reach:
            return None, None
        beyond = np.flatnonzero(evidence >= _threshold(confidence))
        ends = [beyond[beyond < best].max(initial=-1) + 1, beyond[beyond > best].min(initial=_GRID) - 1]
        first, last = (ratio_from(points[end]) for end in ends)
        return first, last

    wide, narrow = interval(reaches[0], CONFIDENCE), interval(reaches[1], EQUIVALENCE_CONFIDENCE)
    p = min(1.0, math.exp(-log_evidence(differences)[-1]))
    point = ratio_from(points[best])
    return RoundsRatio(point, *wide, p, n, n, std_a, std_b, *narrow, tuple(differences.tolist()))


def rounds_needed(differences: Sequence[float], tolerance: float) -> int | None:
    """Rounds, all together, after which 90 % of comparisons have a verdict where nothing changed; None above 200.

    By simulation: the rule itself on rounds drawn from those that were seen, about their median, with signs by chance,
    since both sides are alike then, and smoothed, since they are few (Silverman, Density Estimation, 1986, 3.31).
    Seeded: the same rounds give the same number.
    """
    seen = np.array(differences) - np.median(differences)
    spread = min(float(np.std(seen, ddof=1)), STD_PER_MAD * float(np.median(np.abs(seen))))
    generator, size = np.random.default_rng(0), (_RESAMPLES, _MAX_ROUNDS)
    drawn = generator.choice(seen, size) * generator.choice([-1.0, 1.0], size)
    drawn += generator.normal(0.0, 0.9 * spread * seen.size**-0.2, size)
    for rounds in (25, 50, 100, _MAX_ROUNDS):
        look = looks(drawn[:, :rounds], tolerance)
        reached = np.maximum.accumulate(look.changed | look.same, axis=-1).mean(axis=0) >= POWER
        if reached.any():
            return int(np.argmax(reached)) + 1
    return None
