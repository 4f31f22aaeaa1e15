"""Intervals of time as arrays of starts and ends: unions, how much they cover, and which of several has a moment.

All times are int64 of any unit; an interval holds its start and not its end.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

#: No interval, and the index of nothing.
NONE = -1


def union(start: Integers, end: Integers) -> tuple[Integers, Integers]:
    """What intervals in any order cover: starts and ends of the stretches, in order, apart from each other."""
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(end[order])
    is_first = np.append(True, start[1:] > reached[:-1])[: len(start)]
    is_last = np.append(is_first[1:], True)[: len(start)]
    return start[is_first], reached[is_last]


def covered(start: Integers, end: Integers) -> Callable[[Integers], Integers]:
    """A function of moments: how much of the time before each lies within these intervals.

    The intervals are in order and do not overlap, as `union` and `paint` give them.
    """
    moments = np.column_stack((start, end)).ravel()
    lengths = np.cumsum(np.column_stack((np.zeros_like(start), end - start)).ravel())
    if not len(moments):
        return np.zeros_like
    return lambda at: np.interp(at - moments[0], moments - moments[0], lengths).astype(np.int64)


def paint(start: Integers, end: Integers, rank: Integers | None = None) -> tuple[Integers, Integers, Integers]:
    """Cut time into pieces that have one interval each: starts, ends and the index of the interval, in order.

    Where several overlap, the lowest rank has the time. Without ranks the one that began last has it, of two that began
    together the shorter: of nested ranges the innermost.
    """
    order = np.lexsort((-end, start)) if rank is None else np.lexsort((start, -rank))
    borders = _distinct(start, end)
    first, past = np.searchsorted(borders, start), np.searchsorted(borders, end)
    owner = np.full(max(len(borders) - 1, 0), NONE, dtype=np.int64)
    # The later paints over the earlier.
    for index in order.tolist():
        owner[first[index] : past[index]] = index
    begins = np.flatnonzero(np.diff(owner, prepend=NONE - 1) != 0)
    ends = np.append(begins[1:], len(owner))[: len(begins)]
    is_owned = owner[begins] != NONE
    begins, ends = begins[is_owned], ends[is_owned]
    return borders[begins], borders[ends], owner[begins]


def locate(start: Integers, end: Integers, moments: Integers) -> Integers:
    """The index of the interval around each moment, NONE where there is none; intervals as `paint` gives them."""
    index = np.searchsorted(start, moments, side="right") - 1
    if not len(start):
        return index
    return np.where((index >= 0) & (moments < end[index]), index, NONE)


def cut(start: Integers, end: Integers, moments: Integers) -> tuple[Integers, Integers, Integers]:
    """Cut intervals as `paint` gives them at these moments: starts, ends and the index of the interval, in order."""
    borders = _distinct(start, end, moments)
    index = locate(start, end, borders[:-1])
    is_inside = index != NONE
    return borders[:-1][is_inside], borders[1:][is_inside], index[is_inside]


def _distinct(*moments: Integers) -> Integers:
    """All moments in order, each once. NumPy's `unique` goes by a hash, which takes ten times as long for a million."""
    ordered = np.sort(np.concatenate(moments))
    return ordered[np.diff(ordered, prepend=ordered[:1] - 1) > 0]
