"""Noisy bisection finds a planted change among 64 suspects, from rounds that are really timed."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from lmbench.compare.bisection import Votes, next_suspect, probabilities_of, votes_of
from lmbench.compare.rounds import ratio_by_rounds

COUNT, GOOD_S, GATE = 64, 2e-3, 0.02


def measured_s(sleep_s):
    began_s = time.perf_counter()
    time.sleep(sleep_s)
    return time.perf_counter() - began_s


def measured_difference(sleep_s):
    """log(suspect / good end) of a round: each side sleeps five times, in turn."""
    turns = [math.log(measured_s(sleep_s) / measured_s(GOOD_S)) for _ in range(5)]
    return float(np.median(turns))


def ends_of(bad_s):
    """Rounds of the ends until they differ for certain, or thirty of them."""
    differences = []
    for count in range(1, 31):
        differences.append(measured_difference(bad_s))
        ratio = ratio_by_rounds(differences, [number % 2 == 0 for number in range(count)])
        if count >= 6 and ratio.lies_beyond(GATE):
            return differences
    return None


def first_bad(planted, bad_s):
    """The suspect that the search ends with, where `planted` is the first one that sleeps longer."""
    ends = ends_of(bad_s)
    if ends is None:
        return None
    change = float(np.median(ends))
    votes = [Votes()] * (COUNT - 1) + [votes_of(ends, change)]
    while (index := next_suspect(probabilities_of(votes))) is not None:
        vote = votes_of([measured_difference(bad_s if index >= planted else GOOD_S)], change)
        votes[index] = Votes(votes[index].good + vote.good, votes[index].bad + vote.bad)
    return int(probabilities_of(votes).argmax())


def test_a_change_of_10_percent_is_found_in_19_of_20_histories():
    planted = np.random.default_rng(41).integers(1, COUNT, 20).tolist()
    assert sum(first_bad(index, 1.1 * GOOD_S) == index for index in planted) >= 19


def test_nothing_is_found_where_nothing_changed():
    assert [ends_of(GOOD_S) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize(("votes", "expected"), [([(0, 0), (6, 0), (0, 6), (0, 6)], 2), ([(0, 0), (0, 6)], 1)])
def test_the_first_bad_one_follows_the_last_good_one(votes, expected):
    assert int(probabilities_of([Votes(*vote) for vote in votes]).argmax()) == expected


def test_a_suspect_near_the_border_is_measured_again():
    votes = [Votes(), Votes(0, 0), Votes(1, 1), Votes(0, 0), Votes(0, 6)]
    assert next_suspect(probabilities_of(votes)) == 2
