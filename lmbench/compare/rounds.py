"""The ratio of two sides that were measured in turn, in rounds, and compared again after every round.

Each round contributes one difference: log(step time of B) - log(step time of A). Effects that both sides of a round
share cancel in it: drift from round to round, a changed clock, the hash seed of the server.

The evidence against "the typical difference is m" is a likelihood ratio with the spread integrated out (Lai, Annals of
Statistics 4, 1976). The alternative is a difference that, in units of the spread, is N(0, g), averaged over the g of
`_EFFECTS`. Such evidence may be looked at after every round (Perez-Ortiz et al., Annals of Statistics 52, 2024).

Noise may persist over rounds, as in a first-order autoregressive process, and then looks like a change. So the evidence
is the smallest against any of `_NOISES`, weighted by how persistent the sides' own step times are.

Differences far from m count less: the weight falls from 1 at `_FAR` times their median size to 0 at twice that. It
depends on the size alone, so that without a change both directions lose alike.

**At most 5 % of verdicts are false on one condition**: each side's noise is independent from round to round, or
persists with an autocorrelation up to 0.9. In so few rounds, longer persistence looks the same as a change.

Rates in 10 000 simulated comparisons each, over 60 rounds with gate 1 %, by
`python tests/experiments/simulated_rounds.py`. `false` is `faster` and `slower` together, `rounds` the median number
of rounds until the verdict:

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

#: The number of rounds before the first look.
FIRST_LOOK = 4
#: Variances g of the expected change, in units of the variance of a difference: for small and for large changes.
_EFFECTS = (2.0, 50.0)
#: Kinds of noise that must not pass for a change: the autocorrelation from round to round, and the share of the noise
#: that has it. The share is 1 where the noise of both sides persists, 1/2 where the noise of one side does.
_NOISES = ((0.0, 0.0), (0.5, 1.0), (0.9, 1.0), (0.9, 0.5))
_FAR = 2.2
#: Logarithms of likelihood ratios: `_DOUBT` is added in favour of persistent noise, then its weight is capped at
#: `_MOST_PERSISTENCE`, because drift that both sides share looks like persistence.
_DOUBT, _MOST_PERSISTENCE = 1.5, 0.5
#: The ends of intervals are searched at these distances from the median difference, in standard deviations.
_DISTANCES = np.geomspace(1e-3, 1e3, 700)
#: An autocorrelation above this many standard errors is reported.
_PERSISTS = 1.5
#: A wider interval than from 1/8 to 8 times the ratio is not shown.
_NO_BOUND = 2 * math.log(8)
_MAX_ROUNDS = 200


@dataclass(frozen=True)
class RoundsRatio(Ratio):
    """A ratio of sides that were measured in turn, with the weights of `_NOISES` for the evidence of its rounds."""

    weights: tuple[float, ...] = (0.0,) * len(_NOISES)

    def lies_within(self, tolerance: float) -> bool:
        if self.n_a < FIRST_LOOK or not super().lies_within(tolerance):
            return False
        return bool(is_same(np.array(self.differences), np.array(self.weights), tolerance))


def is_same(differences: Floats, weights: Floats, tolerance: float) -> npt.NDArray[np.bool_]:
    """Whether rounds (the last axis) show a change smaller than the tolerance: two one-sided tests at 5 % each.

    The evidence against each end of the tolerance is two-sided at 10 %, and the median lies between the ends.
    """
    limit = math.log1p(tolerance)
    evidence = [log_evidence(differences - end, weights) for end in (-limit, limit)]
    same: npt.NDArray[np.bool_] = np.min(evidence, axis=0) > _threshold(EQUIVALENCE_CONFIDENCE)
    return same & (np.abs(np.median(differences, axis=-1)) < limit)


def _threshold(confidence: float) -> float:
    """The log evidence that comparisons without a change exceed with probability 1 - confidence at most.

    A test against a single kind of noise would need twice the evidence (20 at 95 %). Half is enough for the smallest
    evidence against several kinds, as the simulation shows.
    """
    return -math.log(2 * (1 - confidence))


def weights_of_noises(sides: Floats) -> Floats:
    """The log likelihood ratio of each of `_NOISES` against independent rounds, in favour of persistence by `_DOUBT`.

    `sides` are the logarithms of step times; its last axis is rounds, and the axis before is A and B. The more
    persistent side decides. The result's first axis is the kind of noise. The likelihoods are restricted ones, since
    the mean is unknown (Patterson and Thompson, Biometrika 58, 1971).
    """
    n, deviations = sides.shape[-1], _trimmed(sides - np.median(sides, axis=-1, keepdims=True))

    def log_likelihood(autocorrelation: float) -> Floats:
        white, log_determinant = _whitened(deviations, autocorrelation, 1.0)
        ones, _ = _whitened(np.ones(n), autocorrelation, 1.0)
        squares = (white**2).sum(axis=-1) - (white * ones).sum(axis=-1) ** 2 / (ones**2).sum()
        constant: float = log_determinant - np.log((ones**2).sum()) / 2
        likelihood: Floats = constant - (n - 1) / 2 * np.log(np.maximum(squares, EQUAL**2))
        return likelihood

    ratios = [(log_likelihood(correlation) - log_likelihood(0.0)).max(axis=-1) for correlation, _ in _NOISES[1:]]
    return np.array([np.zeros(sides.shape[:-2]), *np.minimum(np.array(ratios) + _DOUBT, _MOST_PERSISTENCE)])


def _trimmed(values: Floats) -> Floats:
    """Values times their weight: 1 up to `_FAR` times their median size, falling to 0 at twice that."""
    sizes = np.abs(values)
    medians = np.maximum(np.median(sizes, axis=-1, keepdims=True), EQUAL)
    return values * np.clip(2 - sizes / (_FAR * medians), 0, 1)


def log_evidence(differences: Floats, weights: Floats) -> Floats:
    """The log evidence of the rounds (the last axis) against "no difference", by the weights of `_NOISES`."""
    trimmed, n = _trimmed(differences), differences.shape[-1]
    squares = np.maximum((trimmed**2).sum(axis=-1), EQUAL**2)

    def log_likelihood(residual: Floats) -> Floats:
        # The lower bound keeps the likelihood of identical differences finite.
        likelihood: Floats = -n / 2 * np.log(np.maximum(residual, EQUAL * squares))
        return likelihood

    effects = []
    for g in _EFFECTS:
        residual = squares - trimmed.sum(axis=-1) ** 2 * g / (1 + n * g)
        effects.append(log_likelihood(residual) - 0.5 * math.log1p(n * g))
    noises = []
    for noise, weight in zip(_NOISES, weights, strict=True):
        white, log_determinant = _whitened(trimmed, *noise)
        noises.append(log_likelihood((white**2).sum(axis=-1)) + log_determinant + weight)
    evidence: Floats = np.logaddexp.reduce(effects, axis=0) - math.log(len(effects)) - np.max(noises, axis=0)
    return evidence


def _whitened(values: Floats, autocorrelation: float, share: float) -> tuple[Floats, float]:
    """The values of rounds (the last axis) made independent, and the log determinant of that transformation."""
    whitening = _whitening(autocorrelation, share)[: values.shape[-1], : values.shape[-1]]
    # Unlike `@`, `einsum` does not use BLAS, whose threads wait for each other on a busy machine.
    white: Floats = np.einsum("...i,ji->...j", values, whitening)
    return white, float(np.log(np.diag(whitening)).sum())


@cache
def _whitening(autocorrelation: float, share: float) -> Floats:
    """The matrix that makes rounds with this noise independent: the inverse Cholesky factor of their covariance.

    Its first n rows and columns are the matrix of n rounds.
    """
    rounds = np.arange(_MAX_ROUNDS)
    lags = np.abs(np.subtract.outer(rounds, rounds))
    covariance = share * autocorrelation**lags + (1 - share) * np.eye(_MAX_ROUNDS)
    whitening: Floats = np.linalg.inv(np.linalg.cholesky(covariance))
    return whitening


def ratio_by_rounds(a: Sequence[float], b: Sequence[float]) -> RoundsRatio:
    """The ratio B over A of values paired by round, from the median difference.

    The intervals hold the ratios around it that the evidence does not exclude, at 95 % for a change and at 90 % for
    `same`; None while they are too wide. `p` is below 0.05 where the evidence shows a change. Without spread of the
    differences the intervals are the ratio itself.
    """
    logs_a, logs_b = logs_of(a), logs_of(b)
    differences: Floats = logs_b - logs_a
    n, center, std = differences.size, float(np.median(differences)), float(differences.std())
    point, rounds = ratio_from(center), tuple(differences.tolist())
    if n < 2 or std < EQUAL:
        end, p = (point, float(abs(center) < EQUAL)) if n > 1 else (None, None)
        return RoundsRatio(point, end, end, p, n, n, None, None, end, end, rounds)
    # With 0, no change, among the points the 95 % interval excludes 1 exactly where the test shows a change.
    points = np.sort(np.concatenate([center - std * _DISTANCES, [center, 0.0], center + std * _DISTANCES]))
    weights = weights_of_noises(np.array([logs_a, logs_b]))
    evidence = log_evidence(differences - points[:, None], weights)

    def interval(confidence: float) -> tuple[float | None, float | None]:
        excluded = points[evidence > _threshold(confidence)]
        below, above = excluded[excluded < center], excluded[excluded > center]
        if not below.size or not above.size or above.min() - below.max() > _NO_BOUND:
            return None, None
        inside = points[(points > below.max()) & (points < above.min())]
        return ratio_from(inside.min()), ratio_from(inside.max())

    p = min(1.0, math.exp(-float(log_evidence(differences, weights))) / 2)
    persistence = tuple(lag1_autocorrelation(values) or 0.0 for values in (logs_a, logs_b, differences))
    if persistence[-1] <= _PERSISTS / math.sqrt(n):
        persistence = ()
    return RoundsRatio(
        point, *interval(CONFIDENCE), p, n, n, None, None, *interval(EQUIVALENCE_CONFIDENCE), rounds, persistence,
        tuple(weights.tolist()),
    )  # fmt: skip
