"""SI figures of records as people read them: ms, GiB, %, thousands."""

from __future__ import annotations

MISSING = "-"


def milliseconds(seconds: float | None) -> str:
    """Milliseconds with three decimals under 10, two under 1000, none above."""
    if seconds is None:
        return MISSING
    value = seconds * 1e3
    decimals = 3 if abs(value) < 10 else 2 if abs(value) < 1000 else 0
    return f"{value:,.{decimals}f}"


def percent(fraction: float | None) -> str:
    return MISSING if fraction is None else f"{fraction * 100:.1f} %"


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
