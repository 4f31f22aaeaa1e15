"""The ratio of two sides that were measured in turn, round by round, and looked at after every round.

What a look may rest on is the difference of the logarithms of a round's two step times. Whatever both have in common
(drift from round to round, a clock that changed, the server's hash seed) is not in it.

The evidence against "the typical difference is m" is a ratio of likelihoods, the spread integrated out: of a difference
whose size in units of the spread is N(0, g), over that of no difference (Lai, Annals of Statistics 4, 1976; that it may
be looked at after every round: Perez-Ortiz et al., Annals of Statistics 52, 2024). Where no difference is allowed to
come from noise that persists over rounds, as in a first-order process, evidence is the smallest against any of
`_NOISES`, each weighed by how persistent the sides' own step times are: what could be a side's slow noise proves
nothing. A difference counts for less from `_FAR` times the median on, and beyond twice that not at all: this depends on
its size alone, which is the same in both directions where nothing changed.

**The condition of the 5 %**: a side's own noise is independent from round to round, or persists with an
autocorrelation up to 0.9, on one side or on both. What persists longer cannot be told from a change in so few rounds.

Of 10 000 simulated comparisons each, 60 rounds, gate 1 % (`python tests/experiments/simulated_rounds.py`; `false` are
`faster` and `slower` together, `rounds` the median until the verdict):

                                A/A: false  same in 20  in 60  rounds  +2 %: found in 20  in 60  rounds
    spread 0.3 %                      0.0%       91.0% 100.0%      13              94.9% 100.0%      12
    spread 0.5 %                      0.1%       69.5%  99.9%      17              90.0% 100.0%      13
    spread 1 %                        0.9%        8.2%  94.4%      33              66.1%  99.9%      18
    spread 2 %                        1.0%        0.0%   1.1%      60              19.0%  95.7%      30
    spread 3 %                        1.0%        0.0%   0.0%      60               6.0%  63.2%      50
    0.5 %, drift 1 % a round          0.0%        1.1%  99.5%      31              82.4% 100.0%      17
    0.3 %, two clocks, 2 %            1.0%        4.8%  92.2%      35              62.8% 100.0%      18
    0.3 %, two clocks, 5 %            0.9%        0.4%   0.5%      60              10.5%  81.1%      39
    0.3 %, clock by round, 5 %        0.0%       93.7% 100.0%      13              97.1% 100.0%      11
    0.5 %, 1 in 5 slow by 5 %         0.7%        3.1%  16.9%      60              22.9%  95.9%      28
    0.5 %, 1 in 5 slow by 10 %        0.1%       27.7%  97.9%      25              12.2%  46.3%      60
    1 %, 1 in 5 slow by 30 %          0.6%        1.2%  77.9%      46              28.5%  99.4%      25
    1 %, 0.3 persists                 1.7%        2.0%  33.8%      60              24.8%  85.2%      30
    1 %, 0.6 persists                 0.8%        0.3%   1.8%      60               7.2%  19.3%      60
    1 %, 0.9 persists                 2.2%        0.5%   0.8%      60               9.3%  10.9%      60
    4 %, 0.9 persists                 2.2%        0.0%   0.0%      60               1.7%   2.3%      60
    1 %, B's 0.6 persists             1.9%        1.6%  18.7%      60              21.3%  66.0%      39
    1 %, B's 0.9 persists             4.5%        0.9%   5.1%      60              21.1%  52.8%      51
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from lmbench.records.statistics import (
    CONFIDENCE,
    EQUAL,
    EQUIVALENCE_CONFIDENCE,
    Floats,
    Ratio,
    lag1_autocorrelation,
    logs_of,
    ratio_from,
)

#: Rounds after which the first look may decide.
FIRST_LOOK = 4
#: Variances of the effect that is expected, in units of a difference's: for small ones and for large ones.
_EFFECTS = (2.0, 50.0)
#: Noise that no change may be taken for: autocorrelation from round to round, and the share of the noise that has it
#: (all where both sides' noise persists, half where one side's does).
_NOISES = ((0.0, 0.0), (0.5, 1.0), (0.9, 1.0), (0.9, 0.5))
_FAR = 2.2
#: How far the sides' own step times must speak for independent rounds before it counts, and what they may say for noise
#: that persists, at most, since drift that both share looks like it: logarithms of likelihoods.
_DOUBT, _MOST_PERSISTENCE = 1.5, 0.5
#: Ends of intervals are sought at these distances from the median, in standard deviations.
_DISTANCES = np.geomspace(1e-3, 1e3, 700)
#: Standard errors of an autocorrelation from which on it is told.
_PERSISTS = 1.5
#: An interval that reaches from an eighth to eight times the ratio bounds nothing.
_NO_BOUND = 2 * math.log(8)
_MAX_ROUNDS = 200


@dataclass(frozen=True)
class RoundsRatio(Ratio):
    """A ratio of sides that were measured in turn, judged by the evidence of its rounds."""

    weights: tuple[float, ...] = (0.0,) * len(_NOISES)

    def lies_within(self, tolerance: float) -> bool:
        if self.n_a < FIRST_LOOK or self.equal_low is None or self.equal_high is None:
            return False
        is_inside = max(1 / self.equal_low, self.equal_high) <= 1 + tolerance
        return is_inside and bool(is_same(np.array(self.differences), np.array(self.weights), tolerance))


def is_same(differences: Floats, weights: Floats, tolerance: float) -> npt.NDArray[np.bool_]:
    """Whether there is evidence of less than the tolerance, along the last axis: two one-sided tests at 5 % each.

    Against either end of the tolerance, both directions of which share 0.1, and the median lies between them.
    """
    limit = math.log1p(tolerance)
    evidence = [log_evidence(differences - end, weights) for end in (-limit, limit)]
    same: npt.NDArray[np.bool_] = np.min(evidence, axis=0) > _threshold(EQUIVALENCE_CONFIDENCE)
    return same & (np.abs(np.median(differences, axis=-1)) < limit)


def _threshold(confidence: float) -> float:
    """The logarithm of the evidence that comparisons without a change exceed as rarely as the confidence says.

    Half of what a bet on one kind of noise takes: the evidence is against the kind that explains the rounds best. The
    simulation says that this is enough.
    """
    return -math.log(2 * (1 - confidence))


def weights_of_noises(sides: Floats) -> Floats:
    """How much more likely each of `_NOISES` is than independent rounds, as logarithms, for the more persistent of two
    series of rounds (the last axis; the sides are the one before), in doubt for persistence. The first axis is kinds.

    The likelihoods are restricted ones, since the mean is unknown (Patterson and Thompson, Biometrika 58, 1971).
    """
    n, x = sides.shape[-1], _trimmed(sides - np.median(sides, axis=-1, keepdims=True))

    def log_likelihood(autocorrelation: float) -> Floats:
        white, log_determinant = _whitened(x, autocorrelation, 1.0)
        ones, _ = _whitened(np.ones(n), autocorrelation, 1.0)
        square = (white**2).sum(axis=-1) - (white * ones).sum(axis=-1) ** 2 / (ones**2).sum()
        constant: float = log_determinant - np.log((ones**2).sum()) / 2
        likelihood: Floats = constant - (n - 1) / 2 * np.log(np.maximum(square, EQUAL**2))
        return likelihood

    ratios = [(log_likelihood(kind) - log_likelihood(0.0)).max(axis=-1) for kind, _ in _NOISES[1:]]
    return np.array([np.zeros(sides.shape[:-2]), *np.minimum(np.array(ratios) + _DOUBT, _MOST_PERSISTENCE)])


def _trimmed(values: Floats) -> Floats:
    sizes = np.abs(values)
    medians = np.maximum(np.median(sizes, axis=-1, keepdims=True), EQUAL)
    return values * np.clip(2 - sizes / (_FAR * medians), 0, 1)


def log_evidence(differences: Floats, weights: Floats) -> Floats:
    """The logarithm of the evidence of all rounds (the last axis) against "no difference", with the noises' weights."""
    x, n = _trimmed(differences), differences.shape[-1]
    squares = np.maximum((x * x).sum(axis=-1), EQUAL**2)

    def log_likelihood(rest: Floats) -> Floats:
        # Differences that are all alike would have an infinite one.
        likelihood: Floats = -n / 2 * np.log(np.maximum(rest, EQUAL * squares))
        return likelihood

    effects = [
        log_likelihood(squares - x.sum(axis=-1) ** 2 * g / (1 + n * g)) - 0.5 * math.log1p(n * g) for g in _EFFECTS
    ]
    noises = []
    for kind, weight in zip(_NOISES, weights, strict=True):
        white, log_determinant = _whitened(x, *kind)
        noises.append(log_likelihood((white**2).sum(axis=-1)) + log_determinant + weight)
    evidence: Floats = np.logaddexp.reduce(effects, axis=0) - math.log(len(effects)) - np.max(noises, axis=0)
    return evidence


def _whitened(values: Floats, autocorrelation: float, share: float) -> tuple[Floats, float]:
    """Rounds (the last axis) made independent of each other, and the logarithm of what that does to their volume."""
    whitening = _whitening(autocorrelation, share)[: values.shape[-1], : values.shape[-1]]
    # Without BLAS, whose threads wait for each other on a busy machine.
    white: Floats = np.einsum("...i,ji->...j", values, whitening)
    return white, float(np.log(np.diag(whitening)).sum())


@cache
def _whitening(autocorrelation: float, share: float) -> Floats:
    """What makes rounds of this noise independent: the inverse of their covariance's Cholesky factor, of which the
    first n rows and columns are that of n rounds."""
    rounds = np.arange(_MAX_ROUNDS)
    lags = np.abs(np.subtract.outer(rounds, rounds))
    covariance = share * autocorrelation**lags + (1 - share) * np.eye(_MAX_ROUNDS)
    whitening: Floats = np.linalg.inv(np.linalg.cholesky(covariance))
    return whitening


def ratio_by_rounds(a: Sequence[float], b: Sequence[float]) -> RoundsRatio:
    """B over A, value by value of the same round.

    The ratio is that of the median difference. The intervals are what lies around it without the evidence of a change
    against it (95 %), or of `same` (90 %), None while that is everything; `p` is below 0.05 where there is evidence of
    a change. Where the differences have no spread the ratio and its intervals are one.
    """
    logs_a, logs_b = logs_of(a), logs_of(b)
    differences: Floats = logs_b - logs_a
    n, center, std = differences.size, float(np.median(differences)), float(differences.std())
    point, rounds = ratio_from(center), tuple(differences.tolist())
    if n < 2 or std < EQUAL:
        end, p = (point, float(abs(center) < EQUAL)) if n > 1 else (None, None)
        return RoundsRatio(point, end, end, p, n, n, None, None, end, end, rounds)
    # No change is one of the points, so that the interval excludes it where the test does.
    points = np.sort(np.concatenate([center - std * _DISTANCES, [center, 0.0], center + std * _DISTANCES]))
    weights = weights_of_noises(np.array([logs_a, logs_b]))
    evidence = log_evidence(differences - points[:, None], weights)

    def interval(confidence: float) -> tuple[float | None, float | None]:
        beyond = points[evidence > _threshold(confidence)]
        below, above = beyond[beyond < center], beyond[beyond > center]
        if not below.size or not above.size or above.min() - below.max() > _NO_BOUND:
            return None, None
        inside = points[(points > below.max()) & (points < above.min())]
        return ratio_from(inside.min()), ratio_from(inside.max())

    p = min(1.0, math.exp(-float(log_evidence(differences, weights))) / 2)
    persistence = tuple(lag1_autocorrelation(values) or 0.0 for values in (logs_a, logs_b, differences))
    return RoundsRatio(
        point, *interval(CONFIDENCE), p, n, n, None, None, *interval(EQUIVALENCE_CONFIDENCE), rounds,
        persistence if persistence[-1] > _PERSISTS / math.sqrt(n) else (), tuple(weights.tolist()),
    )  # fmt: skip
