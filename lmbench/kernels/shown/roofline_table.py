"""What kernels attain, as a table, and what must be said of it."""

from __future__ import annotations

from lmbench.kernels.shown.roofline import FLOPS_PER_S, Attained, Roofline
from lmbench.report.table import Entry, Table, fact, numbers, words
from lmbench.report.units import MISSING, milliseconds, percent

_TERA, _GIGA = 1e12, 1e9


def roofline_table(found: Roofline) -> Table:
    """A row for each kind of work; shares are of the datasheet's rate and of what was measured on this device."""
    headings = [*words("work"), *numbers("ms", "per step", "attained", "sheet", "burst", "sustained")]
    caption = (
        "ms of its kernels per step; least work that it needs; attained: that work by the time, and its share of "
        "the datasheet's rate and of what `lmbench ceiling` measured, burst and sustained"
    )
    return Table("Roofline", caption, headings, [_row(row) for row in found.rows])


def _row(row: Attained) -> list[Entry]:
    work = MISSING if row.work is None else _work(row)
    tera = "TFLOP/s" if row.unit == FLOPS_PER_S else "TB/s"
    rate = MISSING if row.per_s is None else f"{row.per_s / _TERA:.3g} {tera}"
    peaks = (row.datasheet_per_s, row.burst_per_s, row.sustained_per_s)
    shares = (percent(row.per_s / peak if row.per_s is not None and peak else None) for peak in peaks)
    return [fact(row.name), *map(Entry, (milliseconds(row.seconds), work, rate, *shares))]


def _work(row: Attained) -> str:
    work = row.work or 0.0
    scale, prefix = (_TERA, "T") if work >= 1e3 * _GIGA else (_GIGA, "G")
    return f"{work / scale:.3g} {prefix}{'FLOP' if row.unit == FLOPS_PER_S else 'B'}"


def roofline_lines(found: Roofline) -> list[tuple[str, str]]:
    """Whose peak, why a figure is missing, and which record of `lmbench ceiling` it is held against."""
    lines = [("peak", found.dtype)]
    lines += [("", f"no figure for {row.name}: {row.reason}") for row in found.rows if row.reason]
    if any(row.name.startswith("attention") for row in found.rows):
        lines.append(("", "fused attention: products of the unmasked half, without what its backward computes again"))
    if found.ceiling is None:
        lines.append(("ceiling", "none of this GPU beside the results: `lmbench ceiling` measures it"))
    else:
        note = f" ({found.ceiling.note})" if found.ceiling.note else ""
        lines.append(("ceiling", f"{found.ceiling.path}{note}"))
    return lines
