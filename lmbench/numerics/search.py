"""Where something that holds for ordinary numbers of a format no longer does, among all its normal numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from lmbench.numerics.formats import Format


@dataclass(frozen=True)
class Edge:
    """Neighbours in a format: for `holds_to` it still holds, for `fails_from` no longer."""

    holds_to: float
    fails_from: float


def find_edges(holds: Callable[[float], bool], of: Format) -> tuple[Edge | None, Edge | None]:
    """Where it fails below and above the numbers for which it holds; None where it holds to the format's own end.

    Every fourth power of two and the largest number are tried; from the ends of the longest run that holds, halving the
    numbers in between finds the neighbours. It must hold for some of them, and for all between those that it holds for.
    """
    first, last = 1 - of.max_exponent, of.max_exponent
    tried = [*(math.ldexp(1.0, exponent) for exponent in range(first, last, 2)), of.largest]
    runs = [list(run) for is_good, run in groupby(range(len(tried)), key=lambda at: holds(tried[at])) if is_good]
    longest = max(runs, key=len)
    low, high = longest[0], longest[-1]
    below = None if low == 0 else _between(tried[low], tried[low - 1], holds, of)
    above = None if high == len(tried) - 1 else _between(tried[high], tried[high + 1], holds, of)
    return below, above


def _between(good: float, bad: float, holds: Callable[[float], bool], of: Format) -> Edge:
    inside, outside = of.place(good), of.place(bad)
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        if holds(of.at(middle)):
            inside = middle
        else:
            outside = middle
    return Edge(of.at(inside), of.at(outside))
