"""Where something that holds for ordinary numbers of a format no longer does, among all its normal numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from lmbench.numerics.formats import Format

#: About so many numbers are tried before those in between.
_TRIED = 32


@dataclass(frozen=True)
class Edge:
    """Neighbours in a format: for `holds_to` it still holds, for `fails_from` no longer; `holds_to` is None where it
    holds for none that was tried."""

    holds_to: float | None
    fails_from: float


def find_edges(holds: Callable[[float], bool], of: Format) -> tuple[Edge | None, Edge | None]:
    """Where it fails below and above the numbers for which it holds; None where it holds to the format's own end.

    Some powers of two and the largest number are tried (each second power in float16, each eighth in bfloat16); from
    the ends of the longest run that holds, halving the numbers in between finds the neighbours. So what holds has to be
    one range, and not a narrow one.
    """
    step = max(2, 2 * of.max_exponent // _TRIED + 1)
    exponents = range(1 - of.max_exponent, of.max_exponent + 1, step)
    tried = [*(math.ldexp(1.0, exponent) for exponent in exponents), of.largest]
    runs = [list(run) for is_good, run in groupby(range(len(tried)), key=lambda at: holds(tried[at])) if is_good]
    if not runs:
        return None, Edge(None, tried[0])
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
