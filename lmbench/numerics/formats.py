"""Floating-point formats: what they can hold, and rounding to them, in exact arithmetic without PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lmbench.errors import UsageError, suggest


@dataclass(frozen=True)
class Format:
    """A binary format by the digits of its significand, the hidden one included, and its largest exponent.

    float16 and float32 are binary16 and binary32 of IEEE 754-2019 (table 3.5); bfloat16 is float32 with 8 digits, as
    `torch.finfo` has it. Zero is the only number below the subnormal ones, and rounding is to nearest, ties to even
    (section 4.3.1).
    """

    name: str
    digits: int
    max_exponent: int

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return math.ldexp(2.0 - 2.0 ** (1 - self.digits), self.max_exponent)

    @property
    def smallest_normal(self) -> float:
        """The smallest number that has all digits."""
        return math.ldexp(1.0, 1 - self.max_exponent)

    @property
    def overflow(self) -> float:
        """The least number that is rounded to infinity: half a unit above the largest. Of 16 and 32 bits only."""
        return math.ldexp(2.0 - 2.0**-self.digits, self.max_exponent)

    @property
    def underflow(self) -> float:
        """The largest number that is rounded to zero: half the smallest subnormal. Of 16 and 32 bits only."""
        return math.ldexp(1.0, 1 - self.max_exponent - self.digits)

    def rounded(self, value: float) -> float:
        """The nearest number of this format; infinity from `overflow` on."""
        if value == 0 or not math.isfinite(value):
            return value
        unit = self._unit(math.frexp(value)[1] - 1)
        near = math.ldexp(round(math.ldexp(value, -unit)), unit) if self.digits < 53 else value
        return near if abs(near) <= self.largest else math.copysign(math.inf, value)

    def place(self, value: float) -> int:
        """Where a positive normal number of this format stands among all of them, counted from zero upwards."""
        exponent = math.frexp(value)[1] - 1
        return exponent * self._binade + round(math.ldexp(value, -self._unit(exponent))) - self._binade

    def at(self, place: int) -> float:
        """The number at that place."""
        exponent, above = divmod(place, self._binade)
        return math.ldexp(self._binade + above, self._unit(exponent))

    @property
    def _binade(self) -> int:
        """How many numbers there are from a power of two to the next."""
        return 1 << (self.digits - 1)

    def _unit(self, exponent: int) -> int:
        """Exponent of the last digit's worth in a number with that exponent."""
        return max(exponent, 1 - self.max_exponent) - self.digits + 1


FORMATS = {
    each.name: each
    for each in (
        Format("float64", 53, 1023),
        Format("float32", 24, 127),
        Format("bfloat16", 8, 127),
        Format("float16", 11, 15),
    )
}
FLOAT32 = FORMATS["float32"]


def find_format(name: str, option: str) -> Format:
    """The format that an option names.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in FORMATS:
        raise UsageError(f"{option} is {name!r}; choose one of {', '.join(FORMATS)}{suggest(name, FORMATS)}")
    return FORMATS[name]
