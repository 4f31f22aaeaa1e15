"""The ratio of two sides that were measured in turn, in rounds, and compared again after every round.

Each round contributes one difference: log(step time of B) - log(step time of A). A coin decides which side of a round
begins. If B takes e^m times as long as A, the sign of (difference - m) is then a fair coin, whatever the machine does:
drift, clocks, bursts, heavy tails and autocorrelation change only the size of a difference.

The evidence against m is the gain of bets on these signs: the mean, over `_STAKES` and over both directions, of the
product over rounds of exp(c u) / cosh(c u). Here c is a stake, and u the sign times a weight of the size. On fair coins
the gain ever exceeds 20 with a probability of at most 5 % (Ville, Etude critique de la notion de collectif, 1939), so
it may be looked at after every round. The interval holds the m that the bets do not refuse.

**At most 5 % of verdicts are false on one condition**: beside its code, a side brings nothing into a round that it
brought into an earlier one. So every round has fresh processes from fresh servers (hash seed, address layout). Where
no cores are idle to start servers ahead, and a start takes longer than half of a round, up to four rounds share a
server, and show only a change beyond the gate: simulated, 0.1, 0.8 and 2.4 % are false if a server changes a side by
0.5, 1 and 1 % and a process by 1, 1 and 0.3 % (standard deviations), but 16 % at 3 and 1 %. Then +2 % takes 7 rounds at
0.5 % noise, and 27 at 1 %.

Rates by `python tests/experiments/simulated_rounds.py`, of 2,000 comparisons without a change and 500 with each change,
gate 1 %, up to 60 rounds. `false` is `faster` or `slower` without a change, `false same` is `same` at a change of just
over 1 %. Other figures are median rounds until the verdict, 61 for none:

                                  false false same A/A same  rounds  +2 %  +5 %  +10 %  +30 %
    independent 0.3 %              0.1%       2.1%     100%       5     6     6      6      6
    independent 0.5 %              1.7%       2.2%      98%       8     6     6      6      6
    independent 1 %                3.5%       1.7%      91%      37     7     6      6      6
    independent 3 %                3.8%       0.0%       0%      61    57     9      6      6
    independent 10 %               3.8%       0.0%       0%      61    61    61     27      6
    autocorrelation 0.9, 3 %       3.2%       2.4%      94%      32     7     6      6      6
    t with 3 degrees, 1 %          2.6%       2.3%      97%      22     6     6      6      6
    1 %, one in five slow by 30 %  3.0%       0.7%      48%      61    20    24     19      7
    3 %, bursts to +100 %          3.1%       0.0%       0%      61    61    14      6      6
    0.5 %, drift 1 % a round       2.4%       3.5%      98%      13     6     6      6      6
    0.5 %, second slow by 1 %      4.1%       3.2%      93%      31     6     6      6      6
    0.3 %, two clocks, 5 %         3.1%       0.1%       5%      61    39     8      6      6
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lmbench.records.statistics import CONFIDENCE, EQUAL, EQUIVALENCE_CONFIDENCE, Floats, Ratio, ratio_from

#: The fewest rounds of a verdict: `same` takes five signs alike, and a change six.
LEAST_ROUNDS, LEAST_OF_CHANGE = 5, 6
#: What the bets stake on each sign, and their shares. Small stakes find small changes after many rounds.
_STAKES, _SHARES = np.array([0.3, 1.0, 2.5, 5.0]), np.array([0.15, 0.20, 0.25, 0.40])
#: A size counts less above this many median sizes, and not at all above twice as many.
_FAR = 2.2
#: The ends of intervals are searched at these distances from the median difference, in standard deviations, and then
#: by so many halvings.
_DISTANCES, _HALVINGS = np.geomspace(1e-2, 1e2, 40), 10
#: Rounds after which half of the comparisons show a change of one standard deviation of the differences (simulated).
_ROUNDS_OF_ONE_STD = 14


def rounds_until(change: float, std: float | None) -> int:
    """About how many rounds show a change of this fraction, if the differences of rounds have this standard deviation;
    the least where that is unknown.

    No change takes as many to be `same` within this tolerance.
    """
    return max(LEAST_OF_CHANGE, math.ceil(_ROUNDS_OF_ONE_STD * ((std or 0.0) / math.log1p(change)) ** 2))


def running_medians(values: Floats) -> Floats:
    """The median of the rounds (the last axis) up to each."""
    return np.stack([np.median(values[..., : end + 1], axis=-1) for end in range(values.shape[-1])], axis=-1)


def log_evidence(differences: Floats) -> Floats:
    """The logarithm of what bets on the signs of rounds (the last axis) gained after each round, if they began with 1.

    Subtract m from the differences for the evidence against "B takes e^m times as long as A".
    """
    sizes = np.abs(differences)
    relative = sizes / np.maximum(running_medians(sizes), EQUAL)
    weighted = np.sign(differences) * relative * np.clip(2 - relative / _FAR, 0, 1)
    stakes = np.concatenate([_STAKES, -_STAKES]) * weighted[..., np.newaxis]
    # The logarithm of exp(x) / cosh(x) is log(2) - log(1 + exp(-2 x)).
    gains = np.cumsum(math.log(2) - np.logaddexp(0, -2 * stakes), axis=-2)
    evidence: Floats = np.logaddexp.reduce(gains + np.log(np.tile(_SHARES / 2, 2)), axis=-1)
    return evidence


def ratio_by_rounds(differences: Sequence[float] | Floats) -> Ratio:
    """The ratio B over A from log(B / A) of each round, whose order a coin decided.

    The intervals reach from the median to the nearest ratios that the evidence refuses, at 95 % for a change and at
    90 % for `same`; None while it refuses none on one side. `p` is below 0.05 where the evidence shows a change.
    """
    rounds = np.asarray(differences, dtype=float)
    center, n = float(np.median(rounds)), rounds.size
    # With 0 among the points, the 95 % interval excludes 1 where `p` shows a change, and nowhere else.
    distances = np.sort(np.append(max(float(rounds.std()), EQUAL) * _DISTANCES, abs(center)))

    def evidence(points: Floats) -> Floats:
        return log_evidence(rounds - points[:, np.newaxis])[:, -1]

    def interval(confidence: float) -> tuple[float | None, float | None]:
        limit, ends = -math.log(1 - confidence), list[float]()
        for sign in (-1, 1):
            points = center + sign * distances
            is_refused = evidence(points) > limit
            # After an outlier the bets may refuse a change near the median, and not that there is none.
            is_zero = points == 0
            if (is_zero & ~is_refused).any():
                is_refused[: is_zero.argmax()] = False
            if not is_refused.any():
                return None, None
            nearest = int(is_refused.argmax())
            inside, outside = points[nearest - 1] if nearest else center, points[nearest]
            for _ in range(_HALVINGS):
                middle = (inside + outside) / 2
                is_kept = evidence(np.array([middle]))[0] <= limit
                inside, outside = (middle, outside) if is_kept else (inside, middle)
            # Equal figures differ by rounding.
            ends.append(ratio_from(round(inside, 12)))
        return ends[0], ends[1]

    p = min(1.0, math.exp(-float(log_evidence(rounds)[-1])))
    intervals = *interval(CONFIDENCE), p, n, n, None, None, *interval(EQUIVALENCE_CONFIDENCE)
    return Ratio(ratio_from(center), *intervals, tuple(rounds.tolist()))
