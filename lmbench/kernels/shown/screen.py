"""Labelled lines and tables of kernels on a screen of any width, and the same lines as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap

from rich.console import Console

from lmbench.report.table import Table
from lmbench.report.text import shortened, shown

_LABEL = 12
_GAP = "  "
_LEAST_WIDTH = 12
#: Labels of paths.
_WHOLE = ("trace", "result", "A", "B")
#: Label and text; without a label the text goes on with what the line before is about.
Line = tuple[str, str]


def print_lines(lines: Iterable[Line], console: Console) -> None:
    """Labelled lines, wrapped beside their labels; a path stays whole, to be copied."""
    for label, raw in lines:
        text = shown(raw)
        is_whole = label in _WHOLE
        pieces = (
            [text] if is_whole else wrap(text, console.width - _LABEL, break_long_words=False, break_on_hyphens=False)
        )
        for index, piece in enumerate(pieces):
            console.out(f"{label if index == 0 else '':<{_LABEL}}{piece}", highlight=False)


def lines_as_markdown(lines: Iterable[Line]) -> list[str]:
    """A list with an item for each label."""
    found: list[str] = []
    for label, text in lines:
        if label:
            found.append(f"- **{label}**: {shown(text)}")
        else:
            # Two blanks break a line within an item.
            found[-1] += "  "
            found.append(f"  {shown(text)}")
    return found


def print_table(table: Table, console: Console) -> None:
    """Title and caption, wrapped to the screen, then the table; its widest words are shortened until it fits."""
    console.out("")
    for line in wrap(f"{table.title}: {table.caption}", console.width):
        console.out(line, highlight=False)
    rows = [[heading.text for heading in table.headings], *([entry.full_text for entry in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = [index for index, heading in enumerate(table.headings) if not heading.is_number]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > console.width:
        widest = max(words, key=widths.__getitem__)
        if widths[widest] <= _LEAST_WIDTH:
            break
        widths[widest] -= 1
    for number, row in enumerate(rows):
        pieces = [
            text.rjust(width) if heading.is_number else shortened(text, width).ljust(width)
            for text, width, heading in zip(row, widths, table.headings, strict=True)
        ]
        console.out(_GAP.join(pieces).rstrip(), highlight=False)
        if number == 0:
            console.out("─" * (sum(widths) + len(_GAP) * (len(widths) - 1)), highlight=False)
