"""Noisy bisection: which of a row of suspects is the first slow one, from rounds of which some mislead.

The first suspect is good and the last one bad. A round measures a suspect against the good end, and its difference
lies on the good or on the bad side of half the change between the ends. Hypothesis k says that the suspects from k on
are bad. Under it each round lies on its suspect's side with the probability `agreement`, which the rounds of the ends
show. So the posterior over k is a product over rounds, and the next round belongs to its median (Burnashev and
Zigangirov, An interval estimation problem for controlled observations, 1974; Karp and Kleinberg, Noisy binary search
and its applications, SODA 2007). A suspect near the border is measured again until the rounds decide, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lmbench.records.statistics import Floats

#: The probability of the answer at which the search ends.
CERTAIN = 0.99
#: However well the rounds agree, one in ten may mislead, such as one beside another process's burst.
_MOST_AGREEMENT, _LEAST_AGREEMENT = 0.9, 0.55


def posterior(good: Floats, bad: Floats, agreement: float) -> Floats:
    """The probability of each suspect to be the first bad one; 0 for the first suspect, which is good.

    `good` and `bad` are the numbers of rounds of each suspect on either side of half the change. No hypothesis is
    preferred before the first round.
    """
    hit, miss = math.log(agreement), math.log(1 - agreement)
    if_good, if_bad = hit * good + miss * bad, miss * good + hit * bad
    # The suspects before the first bad one are good, and it and those after it are bad.
    logs = np.cumsum(if_good)[:-1] + np.cumsum(if_bad[::-1])[::-1][1:]
    shares = np.exp(logs - logs.max())
    return np.append(0.0, shares / shares.sum())


def probabilities_of(differences: Sequence[Sequence[float]], change: float) -> Floats:
    """The probability of each suspect to be the first bad one.

    How often rounds agree with their suspect is estimated from the same rounds, by Laplace's rule of succession: first
    from those of the bad end, then from all, each by the probability that its suspect is bad.

    Args:
        differences: log(suspect / good end) of the rounds of each suspect, in the suspects' order.
        change: log(bad end / good end).
    """
    sides = [np.asarray(rounds) / change > 0.5 for rounds in differences]
    bad = np.array([is_bad_side.sum() for is_bad_side in sides], dtype=float)
    good = np.array([is_bad_side.size for is_bad_side in sides]) - bad
    is_bad = np.append(np.zeros(len(sides) - 1), 1.0)
    for seen in (slice(-1, None), slice(None)):
        hits = float(good[seen] @ (1 - is_bad[seen]) + bad[seen] @ is_bad[seen])
        rounds = float((good + bad)[seen].sum())
        agreement = min(max((hits + 1) / (rounds + 2), _LEAST_AGREEMENT), _MOST_AGREEMENT)
        probabilities = posterior(good, bad, agreement)
        # A suspect is bad if it is the first bad one, or one before it is.
        is_bad = np.cumsum(probabilities)
    return probabilities


def next_suspect(probabilities: Floats) -> int | None:
    """The suspect that parts the probability most evenly; None if one is the first bad one for certain, or if none
    lies between the ends."""
    inner = np.abs(np.cumsum(probabilities)[1:-1] - 0.5)
    return 1 + int(inner.argmin()) if inner.size and probabilities.max() < CERTAIN else None
