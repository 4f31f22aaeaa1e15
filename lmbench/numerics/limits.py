"""Where 16-bit operators must begin to fail, by formula: inputs at which a step's result is rounded to infinity or to
zero. The experiment is held against these.

Steps are rounded to the format; sums and means are added up in float32 and rounded once, as PyTorch does it on CUDA
and on CPUs (`at::opmath_type`, `acc_type` in pytorch/pytorch:aten/src/ATen/AccumulateType.h).
"""

from __future__ import annotations

import math

from lmbench.numerics.formats import FLOAT32, Format


def mean_square_overflows(of: Format, width: int) -> float:
    """|x| from which the mean of `width` squares of x is infinite: a square is (x^2 >= overflow), or their sum in
    float32, whose range bfloat16 shares."""
    return min(math.sqrt(of.overflow), math.sqrt(FLOAT32.overflow / width))


def sum_of_squares_overflows(of: Format, width: int) -> float:
    """|x| from which the sum of `width` squares of x is infinite: width x^2 >= overflow."""
    return math.sqrt(min(of.overflow, FLOAT32.overflow) / width)


def square_underflows(of: Format, eps: float) -> float | None:
    """|x| up to which x^2 is zero, which only matters where eps is zero too."""
    return None if of.rounded(eps) else math.sqrt(of.underflow)


def exponential_overflows(of: Format) -> float:
    """x from which exp(x) is infinite: ln(overflow)."""
    return math.log(of.overflow)


def sum_of_exponentials_overflows(of: Format, width: int) -> float:
    """x from which the sum of `width` times exp(x) is infinite: ln(overflow / width)."""
    return math.log(of.overflow / width)


def exponential_underflows(of: Format) -> float:
    """x from which exp(-x) is zero: -ln(underflow)."""
    return -math.log(of.underflow)
