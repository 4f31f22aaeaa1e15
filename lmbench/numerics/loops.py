"""Adding one number again and again, as the published loops do, worked out exactly for any count of additions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lmbench.numerics.formats import FLOAT32, Format


@dataclass(frozen=True)
class Loop:
    """Where a loop ends: its sum, infinite where it overflowed, and after how many additions it no longer changed
    (None where it did to the end)."""

    total: float
    stalled_after: int | None


def add_in_a_loop(n: int, addend: float, accumulator: Format, addend_format: Format) -> Loop:
    """What `n` times `total += addend` gives, from zero, where total and addend are tensors of these formats.

    PyTorch adds in the wider of both formats (float32 for float16 with bfloat16, torch.promote_types) and rounds the
    sum to the accumulator's. That is done here step by step, but for stretches in which every step is alike: between
    two powers of two the digits' worth does not change, a sum moves on by the same amount each time (after a first
    step that may break a tie), and the stretch is one product. So 10^8 additions take a hundred steps.
    """
    term = abs(addend_format.rounded(addend))
    common = wider(accumulator, addend_format)
    total, left, last = 0.0, n, (0.0, 0.0)
    stalled_after = None
    while left:
        after = accumulator.rounded(common.rounded(total + term))
        move = after - total
        if move == 0:
            stalled_after = n - left
            break
        if math.isinf(after):
            total = after
            break
        # The next power of two, from which on rounding is coarser.
        top = math.ldexp(1.0, math.frexp(total)[1])
        steps = max(1, min(left, int((top - after) / move) - 1)) if (top, move) == last else 1
        total, left, last = total + steps * move, left - steps, (top, move)
    return Loop(math.copysign(total, addend), stalled_after)


def stalls(addend: float, accumulator: Format, addend_format: Format) -> tuple[float, int] | None:
    """The sum from which on such a loop no longer changes, and the additions before that; None where it overflows, or
    where that takes more than 10^15."""
    endless = add_in_a_loop(10**15, addend, accumulator, addend_format)
    if endless.stalled_after is None:
        return None
    return endless.total, endless.stalled_after


def wider(one: Format, other: Format) -> Format:
    """The format that holds the numbers of both (torch.promote_types)."""
    if one.digits == other.digits:
        return one
    widest = max(one, other, key=lambda each: each.digits)
    return widest if widest.max_exponent >= min(one, other, key=lambda each: each.digits).max_exponent else FLOAT32
