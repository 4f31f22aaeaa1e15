"""Whether the figures of a page have their rows: the tables of a Markdown text against the rows of a report's CSV."""

from __future__ import annotations

import csv
import re

#: By the unit in a heading: SI units in one of it, and the ending of the columns that may hold the figure.
_UNITS = {
    "ms": (1e-3, "_s"), "%": (1e-2, "_fraction"), "GiB": (2.0**30, "bytes"), "nat": (1.0, ""),
    "tokens/s": (1.0, "tokens_per_s"), "TFLOP/s": (1e12, "flops_per_s"), "mJ/token": (1e-3, "joules_per_token"),
}  # fmt: skip
_FIGURE = re.compile(r"([+-]?[\d,]*\.?\d+(?:e-?\d+)?)(?: ± ([\d,.]+))?(x?)")


def read_rows(*paths):
    """The rows of CSV files, each with the fields that have a value."""
    return [{name: text for name, text in row.items() if text} for path in paths for row in csv.DictReader(path.open())]


def tables_of(page):
    """The tables of a Markdown text, each with the last heading above it and its rows as mappings."""
    heading, tables, lines = "", [], page.splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|") and not above.startswith("|"):
            tables.append((heading, _cells(line), []))
        elif line.startswith("|") and not re.fullmatch(r"[|:\- ]+", line):
            tables[-1][2].append(dict(zip(tables[-1][1], _cells(line), strict=True)))
    return [(heading, rows) for heading, _, rows in tables]


def without_row(page, rows):
    """The headings of the tables in which a line has figures that no single row has all together."""
    return {
        heading
        for heading, lines in tables_of(page)
        if not all(any(has_figures(row, line) for row in rows) for line in lines)
    }


def has_figures(row, line):
    """Whether one row has every figure of a line, at the precision in which the line states it.

    The line maps headings such as `step (ms)` to texts such as `771.44 ± 0.43 [1]`. Words and settings are in the row
    as they are, where it has a column of their heading.
    """
    return all(_has(row, heading, re.sub(r"( \[\d+\])+$", "", text)) for heading, text in line.items())


def _has(row, heading, text):
    if heading in row or text == "-":
        return row.get(heading) in (text, None)
    match = _FIGURE.fullmatch(text)
    if match is None:
        return True
    value, std, is_ratio = match.groups()
    in_brackets = re.search(r"\((?:± )?([^()]*)\)$", heading)
    unit = in_brackets[1] if in_brackets and in_brackets[1] in _UNITS else heading
    scale, ending = (1.0, "speedup") if is_ratio else _UNITS.get(unit, (1.0, ""))
    # A figure of each phase has the phase behind its unit: `phase_peak_allocated_bytes.forward`.
    named = {name: text for name, text in row.items() if name.endswith(ending) or f"{ending}." in name}
    columns = {name: float(text) for name, text in named.items() if _is_number(text)}
    spreads = {name for name in columns if "_std" in name}
    return any(
        _states(value, scale, number) and (std is None or _states(std, scale, columns.get(_spread(name, ending))))
        for name, number in columns.items()
        if name not in spreads
    )


def _spread(name, ending):
    return f"{name.removesuffix(ending)}_std{ending}"


def _states(text, scale, number):
    """Whether a text rounds a number in units of `scale`."""
    digits = text.replace(",", "")
    decimals, exponent = len(digits.partition("e")[0].partition(".")[2]), int(digits.partition("e")[2] or 0)
    return number is not None and abs(float(digits) - number / scale) <= 0.501 * 10 ** (exponent - decimals)


def _is_number(text):
    return re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", text) is not None


def _cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]
