"""SI figures of records as people read them: ms, GiB, %, thousands."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

MISSING = "-"


def milliseconds(seconds: float | None, spread_s: float | None = None) -> str:
    """Milliseconds with three decimals under 10, two under 1000, none above; with a spread no more than its second
    digit."""
    if seconds is None:
        return MISSING
    value = seconds * 1e3
    decimals = 3 if abs(value) < 10 else 2 if abs(value) < 1000 else 0
    return f"{value:,.{_told(decimals, spread_s)}f}"


def _told(decimals: int, spread_s: float | None) -> int:
    """As many of the decimals of milliseconds as the spread does not make worthless."""
    if not spread_s or not math.isfinite(spread_s):
        return decimals
    return max(0, min(decimals, 1 - math.floor(math.log10(abs(spread_s) * 1e3))))


def percent(fraction: float | None) -> str:
    text = MISSING if fraction is None else f"{fraction * 100:.1f} %"
    return text.removeprefix("-") if text == "-0.0 %" else text


def percent_number(fraction: float) -> str:
    """Percent with one decimal, for a column that names the unit."""
    return f"{fraction * 100:.1f}"


def percent_short(fraction: float) -> str:
    """A limit or floor in percent with the digits that matter: `1 %`, `0.31 %`, `105 %`."""
    return f"{fraction * 100:.3g} %" if abs(fraction) < 1 else f"{fraction * 100:,.0f} %"


def gib(size_bytes: float | None) -> str:
    """GiB (2^30 bytes); MiB under a tenth of one."""
    if size_bytes is None:
        return MISSING
    if abs(size_bytes) < 0.1 * 2**30:
        return f"{size_bytes / 2**20:.1f} MiB"
    return f"{size_bytes / 2**30:.2f} GiB"


def count(number: int | None) -> str:
    """A count as `128.6 M`, `3.41 B`."""
    if number is None:
        return MISSING
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return str(number)


def mean_and_std(mean_s: float | None, std_s: float | None) -> str:
    """`50.59 ± 0.12` or `443 ± 112` in ms: no digits beyond the spread's second; the mean alone where there is none."""
    text = milliseconds(mean_s, std_s)
    if mean_s is None or std_s is None:
        return text
    decimals = len(text.partition(".")[2])
    return f"{text} ± {std_s * 1e3:,.{decimals}f}"


def seconds(value_s: float | None) -> str:
    """Seconds with one decimal from 10 on, two below."""
    return MISSING if value_s is None else f"{value_s:,.{1 if abs(value_s) >= 10 else 2}f}"


def gib_number(size_bytes: float | None) -> str:
    """GiB (2^30 bytes) without its unit, for a column that names it; three decimals under 1, two digits under 0.01."""
    if size_bytes is None:
        return MISSING
    value = size_bytes / 2**30
    if 0 < abs(value) < 0.01:
        return f"{value:.{1 - math.floor(math.log10(abs(value)))}f}"
    return f"{value:.{3 if abs(value) < 1 else 2}f}"


def whole(value: float | None) -> str:
    """A whole number, thousands apart."""
    return MISSING if value is None else f"{value:,.0f}"


def instances(value: float) -> str:
    """A mean number of things: whole numbers as such, others with one decimal, as steps need not be alike."""
    return f"{value:,.0f}" if abs(value - round(value)) < 1e-9 else f"{value:,.1f}"


def microseconds(seconds: float | None) -> str:
    """Microseconds with one decimal under 1000."""
    if seconds is None:
        return MISSING
    value = seconds * 1e6
    return f"{value:,.{1 if abs(value) < 1000 else 0}f}"


def times(ratio: float | None) -> str:
    """A ratio as `1.27x`."""
    return MISSING if ratio is None else f"{ratio:.2f}x"


def signed_percent(fraction: float | None) -> str:
    """A difference of two shares: `+1.2 %`."""
    return MISSING if fraction is None else f"{fraction * 100:+.1f} %"


def change_percent(fraction: float) -> str:
    """A measured change with two decimals, none from 100 % on: `+0.31 %`."""
    return f"{fraction * 100:+,.2f} %" if abs(fraction) < 1 else f"{fraction * 100:+,.0f} %"


def change_range(low: float, high: float) -> str:
    """The interval of a change: `-0.31 .. +0.42 %`."""
    return f"{change_percent(low).removesuffix(' %')} .. {change_percent(high)}"


def signed(value: float | None) -> str:
    """A small difference with its sign, two significant digits: `+0.0031`, `0`."""
    if value is None:
        return MISSING
    return "0" if value == 0 else f"{value:+.2g}"


def plain(value: float) -> str:
    """A number in whatever unit its column names: four significant digits, from 1000 on whole and thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class Unit:
    """The unit that a column shows: its word for the heading, what SI is multiplied by, and a number as text.

    `ending` is what a name ends in whose number is in this unit, instead of the SI unit's own.
    """

    word: str
    scale: float
    text: Callable[[float], str]
    ending: str = ""


#: A column of words; its unit is compared by identity.
WORDS = Unit("", 1.0, str)
MS = Unit("ms", 1e3, milliseconds, "_ms")
SECONDS = Unit("s", 1.0, seconds, "_s")
PERCENT = Unit("%", 100.0, percent_number, "_percent")
GIB = Unit("GiB", 2.0**-30, gib_number, "_gib")
COUNT = Unit("", 1.0, whole)
TIMES = Unit("", 1.0, times)

_PLAIN = Unit("", 1.0, plain)
_OF_FIELDS = {
    "s": MS, "bytes": GIB, "fraction": PERCENT, "count": Unit("", 1.0, instances), "index": _PLAIN, "1": _PLAIN,
}  # fmt: skip


def unit_of(field_unit: str) -> Unit:
    """The unit in which a field of the schema is shown, by the unit that it is recorded in."""
    return _OF_FIELDS.get(field_unit, Unit(field_unit, 1.0, plain))


def duration(seconds: float) -> str:
    """Seconds in words that are short: 4.2 s, 3 min, 1 h 5 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 60 * 100 else f"{minutes // 60} h"
