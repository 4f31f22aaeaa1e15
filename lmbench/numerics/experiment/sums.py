"""Sums as PyTorch makes them on a device: by a loop over tensors, and by its own reduction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from lmbench.errors import UsageError
from lmbench.numerics.formats import FORMATS, Format
from lmbench.numerics.loops import add_in_a_loop, stalls
from lmbench.numerics.record import Curve, CurvePoint, PublishedSum, Sum, Summation
from lmbench.reference.published import Accumulation

#: Additions of a loop that are made in PyTorch too, to see that it does what was worked out.
TRIED_ADDITIONS = 2000
#: A curve begins here and goes on to this many additions, or to what was asked for.
CURVE_FROM, CURVE_TO = 10, 1_000_000


def published_sum(of: Sequence[Accumulation], device: torch.device) -> PublishedSum:
    """One loop that several sources have published, run on the device."""
    first = of[0]
    formats = (FORMATS[first.accumulator], FORMATS[first.addend_dtype])
    total = run_loop(first.n, first.addend, *formats, device, first.is_cast)
    return PublishedSum(
        accumulator=first.accumulator,
        addend_dtype=first.addend_dtype,
        is_cast=first.is_cast,
        n=first.n,
        addend=first.addend,
        total=total,
        published={each.source: each.result for each in of},
    )


def sum_up(n: int, addend: float, accumulator: Format, addend_format: Format, device: torch.device) -> Summation:
    """Both ways to add up, and what a loop that goes on for ever comes to.

    Raises:
        UsageError: the addend is infinite in its format.
    """
    rounded = _held(addend, addend_format)
    tried = min(n, TRIED_ADDITIONS)
    found = run_loop(tried, addend, accumulator, addend_format, device)
    end = stalls(addend, accumulator, addend_format)
    point = _point(n, addend, accumulator, addend_format, device)
    return Summation(
        accumulator=accumulator.name,
        addend_dtype=addend_format.name,
        n=n,
        rounded_addend=rounded,
        loop=point.loop,
        reduction=point.reduction,
        stalls_at=None if end is None else end[0],
        stalls_after=None if end is None else end[1],
        tried_additions=tried,
        is_exact=found == add_in_a_loop(tried, addend, accumulator, addend_format).total,
    )


def curve(n: int, addend: float, accumulator: Format, addend_format: Format, device: torch.device) -> Curve:
    """Both ways at 10, 20, 50, 100 and so on, and at n.

    Raises:
        UsageError: the addend is infinite in its format.
    """
    _held(addend, addend_format)
    counts = sorted({n, *_counts(max(n, CURVE_TO))})
    points = [_point(count, addend, accumulator, addend_format, device) for count in counts]
    return Curve(accumulator.name, addend_format.name, points)


def run_loop(
    n: int, addend: float, accumulator: Format, addend_format: Format, device: torch.device, is_cast: bool = False
) -> float:
    """What `n` times `total += addend` gives in PyTorch; with `is_cast` the addend is converted to float32 before."""
    total = torch.tensor(0.0, dtype=_dtype(accumulator), device=device)
    term = torch.tensor(addend, dtype=_dtype(addend_format), device=device)
    for _ in range(n):
        total += term.float() if is_cast else term
    return float(total.item())


def reduce(n: int, addend: float, accumulator: Format, addend_format: Format, device: torch.device) -> float:
    """What `torch.sum(addends, dtype=accumulator)` gives for `n` addends.

    PyTorch adds 16-bit numbers up in float32, along a tree, and rounds once, at the end.
    """
    addends = torch.full((n,), addend, dtype=_dtype(addend_format), device=device)
    return float(torch.sum(addends, dtype=_dtype(accumulator)).item())


def _point(n: int, addend: float, accumulator: Format, addend_format: Format, device: torch.device) -> CurvePoint:
    loop = add_in_a_loop(n, addend, accumulator, addend_format).total
    reduction = reduce(n, addend, accumulator, addend_format, device)
    return CurvePoint(n, *(_judged(total, n, addend, addend_format) for total in (loop, reduction)))


def _judged(total: float, n: int, addend: float, addend_format: Format) -> Sum:
    if not math.isfinite(total):
        return Sum(None, None, None)
    held = addend_format.rounded(addend)
    return Sum(total, total / (n * addend) - 1, total / (n * held) - 1 if held else 0.0)


def _held(addend: float, addend_format: Format) -> float:
    rounded = addend_format.rounded(addend)
    if math.isinf(rounded):
        raise UsageError(
            f"--addend {addend:g} is infinite in {addend_format.name}, whose largest number is "
            f"{addend_format.largest:g}; give a smaller one, or another --addend_dtype"
        )
    return rounded


def _counts(last: int) -> Iterable[int]:
    decade = CURVE_FROM
    while decade <= last:
        yield from (decade * digit for digit in (1, 2, 5) if decade * digit <= last)
        decade *= 10


def _dtype(of: Format) -> torch.dtype:
    found: torch.dtype = getattr(torch, of.name)
    return found
