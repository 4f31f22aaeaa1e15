"""Cases that are words, as a table in the test's text."""

from __future__ import annotations


def rows(text):
    """A list of each line's cells, which stand between `|`; a table of one column is a list of its lines."""
    cells = [[cell.strip() for cell in line.split(" | ")] for line in text.strip().splitlines()]
    return [row[0] if len(row) == 1 else row for row in cells]
