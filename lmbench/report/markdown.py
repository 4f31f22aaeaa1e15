"""The report as Markdown: aligned pipe tables that can be read as they are and pasted anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lmbench.report.table import BLANK, Part, Table
from lmbench.text import one_line

_ENTITY = re.compile(r"&(?=#?\w+;)")


def parts_to_markdown(parts: Iterable[Part]) -> str:
    """Tables, and lines as a list with an item for each label, ready to paste; ends in a line feed."""
    lines: list[str] = []
    for part in parts:
        if isinstance(part, Table):
            lines += ["", *table_lines(part)]
        elif part == BLANK:
            lines.append("")
        elif part[0]:
            lines.append(f"- **{part[0]}**: {escaped(part[1])}")
        else:
            # Two blanks break a line within an item.
            lines[-1] += "  "
            lines.append(f"  {escaped(part[1])}")
    return "\n".join(lines).rstrip() + "\n"


def table_lines(table: Table) -> list[str]:
    """One table with its title, caption and notes."""
    headings = [escaped(heading.text) for heading in table.headings]
    rows = [[escaped(entry.full_text) for entry in row] for row in table.rows]
    columns = list(zip(headings, *rows, strict=True))
    widths = [max(3, *(len(text) for text in column)) for column in columns]
    numbers = [heading.is_number for heading in table.headings]
    lines = [f"**{escaped(table.title)}**: {escaped(table.caption)}", ""]
    lines.append(_line(headings, widths, numbers))
    rules = [f"{'-' * (width - 1)}{':' if number else '-'}" for width, number in zip(widths, numbers, strict=True)]
    lines.append(f"| {' | '.join(rules)} |")
    lines += [_line(row, widths, numbers) for row in rows]
    if table.notes:
        lines += ["", *(f"[{number}] {escaped(note)}  " for number, note in enumerate(table.notes, start=1))]
        lines[-1] = lines[-1].rstrip()
    return lines


def _line(texts: Sequence[str], widths: Sequence[int], numbers: Sequence[bool]) -> str:
    padded = (
        text.rjust(width) if number else text.ljust(width)
        for text, width, number in zip(texts, widths, numbers, strict=True)
    )
    return f"| {' | '.join(padded)} |"


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line: no tag, no entity, no cell of its own, no link or picture."""
    text = _ENTITY.sub("&amp;", one_line(text))
    for character, written in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("*", "\\*"), ("](", "]\\(")):
        text = text.replace(character, written)
    return text
