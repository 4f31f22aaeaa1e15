"""Noisy bisection: which of a row of suspects is the first slow one, from rounds of which some mislead.

The first suspect is good and the last one bad. A round measures a suspect against the good end, and its difference
lies on the good or on the bad side of half the change between the ends. Hypothesis k says that the suspects from k on
are bad. Under it each round lies on its suspect's side with the probability `agreement`, which the rounds of the ends
show. So the posterior over k is a product over rounds, and the next round belongs to its median (Burnashev and
Zigangirov, An interval estimation problem for controlled observations, 1974; Karp and Kleinberg, Noisy binary search
and its applications, SODA 2007). A suspect near the border is measured again until the rounds decide, never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lmbench.records.statistics import Floats

#: The probability of the answer at which the search ends.
CERTAIN = 0.99
#: However well the rounds agree, one in ten may mislead, such as one beside another process's burst.
_MOST_AGREEMENT, _LEAST_AGREEMENT = 0.9, 0.55


class Votes(NamedTuple):
    """How many rounds of a suspect lay on either side of half the change."""

    good: int = 0
    bad: int = 0


def votes_of(differences: Sequence[float], change: float) -> Votes:
    """The votes of rounds with these log(suspect / good end), where log(bad end / good end) is `change`."""
    is_bad = np.asarray(differences) / change > 0.5
    return Votes(int((~is_bad).sum()), int(is_bad.sum()))


def posterior(votes: Sequence[Votes], agreement: float) -> Floats:
    """The probability of each suspect to be the first bad one; 0 for the first suspect, which is good.

    `votes` has those of every suspect, in their order. No hypothesis is preferred before the first round.
    """
    counts = np.array(votes, dtype=float)
    hit, miss = np.log(agreement), np.log(1 - agreement)
    if_good, if_bad = counts @ [hit, miss], counts @ [miss, hit]
    # The suspects before the first bad one are good, and it and those after it are bad.
    logs = np.cumsum(if_good)[:-1] + np.cumsum(if_bad[::-1])[::-1][1:]
    shares = np.exp(logs - logs.max())
    return np.append(0.0, shares / shares.sum())


def probabilities_of(votes: Sequence[Votes]) -> Floats:
    """The probability of each suspect to be the first bad one, from the votes of all suspects.

    How often rounds agree with their suspect is estimated from the same votes, by Laplace's rule of succession: first
    from those of the bad end, then from all, each by the probability that its suspect is bad.
    """
    is_bad = np.append(np.zeros(len(votes) - 1), 1.0)
    counts = np.array(votes, dtype=float)
    probabilities = np.zeros(len(votes))
    for seen in (slice(-1, None), slice(None)):
        good, bad = counts[seen].T
        hits = float(good @ (1 - is_bad[seen]) + bad @ is_bad[seen])
        agreement = min(max((hits + 1) / (float(good.sum() + bad.sum()) + 2), _LEAST_AGREEMENT), _MOST_AGREEMENT)
        probabilities = posterior(votes, agreement)
        # A suspect is bad if it is the first bad one, or one before it is.
        is_bad = np.cumsum(probabilities)
    return probabilities


def next_suspect(probabilities: Floats) -> int | None:
    """The suspect that parts the probability most evenly; None if one is the first bad one for certain, or if none
    lies between the ends."""
    inner = np.abs(np.cumsum(probabilities)[1:-1] - 0.5)
    return 1 + int(inner.argmin()) if inner.size and probabilities.max() < CERTAIN else None
