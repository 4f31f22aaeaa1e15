"""Intervals of time as arrays of starts and ends: their union, the time they cover, and the owner of each moment.

All times are int64 in any one unit. An interval includes its start and excludes its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

#: The index for a moment outside all intervals.
NONE = -1


def take(column: Any, index: Integers, default: Any) -> Any:
    """The column's value at each index; where the index is NONE the default, of which there may be one for each row."""
    column = np.asarray(column)
    values = np.full(len(index), default, dtype=column.dtype if column.dtype.kind in "bi" else object)
    is_known = index != NONE
    values[is_known] = column[index[is_known]]
    return values


def union(start: Integers, end: Integers) -> tuple[Integers, Integers]:
    """Merge intervals, in any order, that overlap or touch: starts and ends of the disjoint stretches, sorted."""
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(end[order])
    is_first = np.append(True, start[1:] > reached[:-1])[: len(start)]
    is_last = np.append(is_first[1:], True)[: len(start)]
    return start[is_first], reached[is_last]


def covered(start: Integers, end: Integers) -> Callable[[Integers], Integers]:
    """A function of moments: how much of the time before each moment lies within the intervals.

    The intervals must be sorted and disjoint, as `union` and `paint` return them.
    """
    borders = np.column_stack((start, end)).ravel()
    lengths = np.cumsum(np.column_stack((np.zeros_like(start), end - start)).ravel())
    if not len(borders):
        return np.zeros_like
    # `interp` computes in float64, which holds nanoseconds exactly when they are counted from the first border.
    return lambda moments: np.interp(moments - borders[0], borders - borders[0], lengths).astype(np.int64)


def paint(start: Integers, end: Integers, rank: Integers | None = None) -> tuple[Integers, Integers, Integers]:
    """Cut time into pieces that one interval each owns: starts, ends and the owner's index, in order of time.

    Where intervals overlap, the lowest rank owns the time, and among equal ranks the one that began last. Without
    ranks the interval that began last owns it, among those the shortest: the innermost of nested ranges.
    """
    order = np.lexsort((-end, start)) if rank is None else np.lexsort((start, -rank))
    borders = _distinct(start, end)
    first, past = np.searchsorted(borders, start), np.searchsorted(borders, end)
    owner = np.full(max(len(borders) - 1, 0), NONE, dtype=np.int64)
    # Each interval paints over those before it.
    for index in order.tolist():
        owner[first[index] : past[index]] = index
    begins = np.flatnonzero(np.diff(owner, prepend=NONE - 1) != 0)
    ends = np.append(begins[1:], len(owner))[: len(begins)]
    is_owned = owner[begins] != NONE
    begins, ends = begins[is_owned], ends[is_owned]
    return borders[begins], borders[ends], owner[begins]


def locate(start: Integers, end: Integers, moments: Integers) -> Integers:
    """The index of the interval that contains each moment, or NONE. The intervals are as `paint` returns them."""
    index = np.searchsorted(start, moments, side="right") - 1
    if not len(start):
        return index
    return np.where((index >= 0) & (moments < end[index]), index, NONE)


def cut(start: Integers, end: Integers, moments: Integers) -> tuple[Integers, Integers, Integers]:
    """Cut intervals, as `paint` returns them, at these moments: starts, ends and interval's index of each piece."""
    borders = _distinct(start, end, moments)
    index = locate(start, end, borders[:-1])
    is_inside = index != NONE
    return borders[:-1][is_inside], borders[1:][is_inside], index[is_inside]


def _distinct(*moments: Integers) -> Integers:
    """The distinct moments, sorted. `np.unique` hashes, which takes ten times as long for a million moments."""
    ordered = np.sort(np.concatenate(moments))
    return ordered[np.diff(ordered, prepend=ordered[:1] - 1) > 0]
