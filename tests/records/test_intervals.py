"""Intervals against counts at single moments."""

from __future__ import annotations

import numpy as np
from tables import cases

from lmbench.records.intervals import NONE, covered, locate, paint, union


@cases("seed", *range(20))
def test_every_moment_is_counted_as_by_hand(seed):
    chance = np.random.default_rng(seed)
    start = chance.integers(0, 60, seed)
    end = start + chance.integers(0, 20, seed)
    rank = chance.integers(0, 4, seed)
    moments = np.arange(-5, 90)
    around = [[i for i in range(seed) if start[i] <= moment < end[i]] for moment in moments]

    stretches = union(start, end)
    assert (np.diff(np.column_stack(stretches).ravel()) > 0).all() or seed < 2 or (end == start).any()
    is_covered = np.array([bool(those) for those in around])
    assert (covered(*stretches)(moments) == np.cumsum(is_covered) - is_covered).all()

    for ranks, key in ((None, lambda i: (start[i], -end[i], i)), (rank, lambda i: (-rank[i], start[i], i))):
        begins, ends, owner = paint(start, end, ranks)
        piece = locate(begins, ends, moments)
        expected = [max(those, key=key) if those else NONE for those in around]
        assert [owner[p] if p != NONE else NONE for p in piece] == expected
        assert (ends[:-1] <= begins[1:]).all()
