"""Noisy bisection finds a planted change among 64 suspects, from rounds whose noise is half of it."""

from __future__ import annotations

import math

import numpy as np

from lmbench.compare.bisection import next_suspect, probabilities_of
from lmbench.compare.rounds import ratio_by_rounds

COUNT, CHANGE, GATE = 64, math.log(1.1), 0.02


class Machine:
    """Differences of rounds, log(suspect / good end), with a spread of 4 % and a machine's outliers."""

    def __init__(self, seed):
        self._rng = np.random.default_rng(seed)

    def difference(self, change):
        return change + 0.025 * float(self._rng.standard_t(3))

    def ends(self, change):
        """Rounds of the ends until they differ for certain; None if thirty of them do not."""
        differences = []
        for count in range(1, 31):
            differences.append(self.difference(change))
            if count >= 6 and ratio_by_rounds(differences).lies_beyond(GATE):
                return differences
        return None


def first_bad(planted, machine):
    """The suspect that the search ends with, where `planted` is the first one that is slower."""
    ends = machine.ends(CHANGE)
    if ends is None:
        return None
    change = float(np.median(ends))
    rounds = [[] for _ in range(COUNT - 1)] + [ends]
    while (index := next_suspect(probabilities_of(rounds, change))) is not None:
        rounds[index].append(machine.difference(CHANGE if index >= planted else 0.0))
    return int(probabilities_of(rounds, change).argmax())


def test_a_change_of_10_percent_is_found_in_19_of_20_histories():
    planted = np.random.default_rng(41).integers(1, COUNT, 20).tolist()
    assert sum(first_bad(index, Machine(seed)) == index for seed, index in enumerate(planted)) >= 19


def test_nothing_is_found_where_nothing_changed():
    assert [Machine(seed).ends(0.0) for seed in range(2)] == [None] * 2
