"""Which event lies inside which, on one thread; all by time stamps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lmbench.kernels.trace.events import NONE, Integers


def parents(thread: Integers, start_ns: Integers, end_ns: Integers) -> Integers:
    """Index of the innermost event around each event, NONE at the top.

    Events stand by thread, then start, then the longer first. One that begins inside another and ends after it is that
    one's child all the same.
    """
    found: list[int] = []
    open_events: list[int] = []
    current = None
    starts, ends = start_ns.tolist(), end_ns.tolist()
    for index, own_thread in enumerate(thread.tolist()):
        if own_thread != current:
            current = own_thread
            open_events = []
        start = starts[index]
        while open_events and ends[open_events[-1]] <= start:
            open_events.pop()
        found.append(open_events[-1] if open_events else NONE)
        open_events.append(index)
    return np.array(found, dtype=np.int64)


def innermost(
    thread: Integers, start_ns: Integers, end_ns: Integers, parent: Integers, of_thread: Integers, at_ns: Integers
) -> Integers:
    """Index of the innermost event around each moment on its thread (pairs of `of_thread`, `at_ns`), NONE if none."""
    found = np.full(len(at_ns), NONE, dtype=np.int64)
    for own in np.unique(of_thread) if len(thread) else ():
        first, last = np.searchsorted(thread, [own, own + 1])
        of_own = np.flatnonzero(of_thread == own)
        moments = at_ns[of_own]
        last_begun = first + np.searchsorted(start_ns[first:last], moments, side="right") - 1
        found[of_own] = _climb(np.where(last_begun < first, NONE, last_begun), moments, end_ns, parent)
    return found


def _climb(index: Integers, moments: Integers, end_ns: Integers, parent: Integers) -> Integers:
    """From the event that began last, outwards to one that has not ended."""
    while True:
        is_over = (index != NONE) & (end_ns[index] <= moments)
        if not is_over.any():
            return index
        index = np.where(is_over, parent[index], index)


def flatten(start_ns: Sequence[int], end_ns: Sequence[int]) -> tuple[Integers, Integers, Integers]:
    """Nested ranges as pieces beside each other: starts, ends, and the range that each piece belongs to.

    Where ranges overlap, the one that began last has the time (of two that began together, the shorter).
    """
    order = sorted(range(len(start_ns)), key=lambda index: (start_ns[index], -end_ns[index]))
    borders = sorted({*start_ns, *end_ns})
    pieces: list[tuple[int, int, int]] = []
    waiting = iter(order)
    coming = next(waiting, None)
    open_ranges: list[int] = []
    for left, right in pairwise(borders):
        while coming is not None and start_ns[coming] <= left:
            open_ranges.append(coming)
            coming = next(waiting, None)
        while open_ranges and end_ns[open_ranges[-1]] <= left:
            open_ranges.pop()
        if open_ranges:
            pieces.append((left, right, open_ranges[-1]))
    columns = np.array(pieces, dtype=np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]
