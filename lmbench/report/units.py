"""The SI numbers of records as people read them: in ms, GiB and %, with separated thousands."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MISSING = "-"


def _text(template: str, scale: float = 1.0, limit: float = math.inf, above: str = "") -> Callable[[float | None], str]:
    """A function that formats a number times `scale` by the template, or by `above` from `limit` on; None is `-`."""

    def text(value: float | None) -> str:
        if value is None:
            return MISSING
        number = value * scale
        return (template if abs(number) < limit else above).format(number)

    return text


percent = _text("{:z.1f} %", 100)
#: Percent without the sign, for a column that names the unit.
percent_number = _text("{:z.1f}", 100)
#: A limit or floor in percent with three significant digits at most: `1 %`, `0.31 %`, `105 %`.
percent_short = _text("{:.3g} %", 100, 100, "{:,.0f} %")
#: A difference of two shares: `+1.2 %`.
signed_percent = _text("{:+.1f} %", 100)
#: A measured change: `+0.31 %`, `+120 %`.
change_percent = _text("{:+,.2f} %", 100, 100, "{:+,.0f} %")
seconds = _text("{:,.2f}", 1, 10, "{:,.1f}")
microseconds = _text("{:,.1f}", 1e6, 1000, "{:,.0f}")
#: A ratio: `1.27x`.
times = _text("{:.2f}x")
millijoules = _text("{:.3g}", 1e3)
whole = _text("{:,.0f}")
#: A number in the unit that its column names: four significant digits, from 1000 on a whole number.
plain = _text("{:.4g}", 1, 1000, "{:,.0f}")


def milliseconds(time_s: float | None, spread_s: float | None = None) -> str:
    """Milliseconds with three decimals under 10, two under 1000 and none above; never more than the spread's first two
    digits."""
    if time_s is None:
        return MISSING
    value = time_s * 1e3
    decimals = 3 if abs(value) < 10 else 2 if abs(value) < 1000 else 0
    if spread_s and math.isfinite(spread_s):
        decimals = max(0, min(decimals, 1 - math.floor(math.log10(abs(spread_s) * 1e3))))
    return f"{value:,.{decimals}f}"


def mean_and_std(mean_s: float, std_s: float | None) -> str:
    """`50.59 ± 0.12` or `443 ± 112` in ms, with no digits beyond the spread's second; the mean alone if std is None."""
    text = milliseconds(mean_s, std_s)
    if std_s is None:
        return text
    decimals = len(text.partition(".")[2])
    return f"{text} ± {std_s * 1e3:,.{decimals}f}"


def gib(size_bytes: float | None) -> str:
    """A size in GiB (2^30 bytes), or in MiB below 0.1 GiB."""
    if size_bytes is None:
        return MISSING
    if abs(size_bytes) < 0.1 * 2**30:
        return f"{size_bytes / 2**20:.1f} MiB"
    return f"{size_bytes / 2**30:.2f} GiB"


def gib_number(size_bytes: float) -> str:
    """A size in GiB (2^30 bytes) for a column that names the unit: three decimals under 1, two digits under 0.01."""
    value = size_bytes / 2**30
    if 0 < abs(value) < 0.01:
        return f"{value:.{1 - math.floor(math.log10(abs(value)))}f}"
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}"


def count(number: int) -> str:
    """A count as `128.6 M`, `3.41 B`."""
    sizes = {1e9: " B", 1e6: " M", 1e3: " k", 1: ""}
    size = next((size for size in sizes if number >= size), 1)
    return f"{number / size:.4g}{sizes[size]}"


def counted(number: int, word: str) -> str:
    """A number of things: `1 run`, `3 runs`."""
    return f"{number} {word}" + ("" if number == 1 else "s")


def instances(value: float) -> str:
    """A mean count over steps, which may differ: a whole number as such, another with one decimal."""
    return f"{value:,.0f}" if abs(value - round(value)) < 1e-9 else f"{value:,.1f}"


def tally(words: Iterable[str]) -> str:
    """How often each word occurs, the most frequent first: `3 ok, 1 timeout`; empty without words."""
    return ", ".join(f"{number} {word}" for word, number in Counter(words).most_common())


def change_range(low: float, high: float) -> str:
    """The interval of a change: `-0.31 .. +0.42 %`."""
    return f"{change_percent(low).removesuffix(' %')} .. {change_percent(high)}"


def signed(value: float) -> str:
    """A small difference with its sign, two significant digits: `+0.0031`, `0`."""
    return f"{value:+.2g}" if value else "0"


def duration(time_s: float) -> str:
    """A short text for a time: `4.2 s`, `2.5 min`, `15 min`, `1 h 5 min`."""
    if time_s < 9.95:
        return f"{time_s:.1f} s"
    if time_s < 99.5:
        return f"{time_s:.0f} s"
    if time_s < 9.95 * 60:
        return f"{time_s / 60:.1f} min"
    hours, minutes = divmod(round(time_s / 60), 60)
    if not hours:
        return f"{minutes} min"
    return f"{hours} h {minutes} min" if hours < 100 else f"{hours} h"


@dataclass(frozen=True)
class Unit:
    """The unit of a column: the function that formats an SI number, its word in the heading, and the factor from SI."""

    text: Callable[[float], str]
    word: str = ""
    scale: float = 1.0


#: The unit of a column of words; code compares it by identity.
WORDS = Unit(str)
#: The unit of a setting that is a number: it is shown as it is, but aligned to the right.
SETTING = Unit(str)
MS = Unit(milliseconds, "ms", 1e3)
SECONDS = Unit(seconds, "s")
PERCENT = Unit(percent_number, "%", 100.0)
GIB = Unit(gib_number, "GiB", 2.0**-30)
COUNT = Unit(whole)
TIMES = Unit(times)

LOSS = Unit("{:.4f}".format, "nat")
#: The columns of joules per token and of tokens/s name the unit in their titles.
MILLIJOULES = Unit(millijoules, scale=1e3)
_PLAIN = Unit(plain)
_OF_FIELDS = {
    "s": MS, "bytes": GIB, "fraction": PERCENT, "count": Unit(instances), "index": _PLAIN, "1": _PLAIN, "nat": LOSS,
    "tokens/s": COUNT, "J/token": MILLIJOULES,
}  # fmt: skip


def unit_of(field_unit: str) -> Unit:
    """The unit in which a field of the schema is shown, by the unit in which it is recorded."""
    return _OF_FIELDS.get(field_unit, Unit(plain, field_unit))
