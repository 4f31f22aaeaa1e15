"""Tables and labelled lines on a screen of any width."""

from __future__ import annotations

from textwrap import wrap

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as ScreenTable

from lmbench.report.table import Table
from lmbench.report.text import shown

_LABEL = 10
_CELL_WIDTH = 16
_ANY_WIDTH = 10_000


def print_table(table: Table, console: Console) -> None:
    """Print a table whole: one wider than the screen is not cropped, which would falsify its figures."""
    screen, width = _on_screen(table), console.width
    needed = console.measure(screen, options=console.options.update_width(_ANY_WIDTH)).minimum
    console.width = max(width, needed)
    console.print(screen)
    console.width = width


def print_line(label: str, text: str, console: Console) -> None:
    """Print a labelled line, folded under itself; a path or command longer than the screen stays whole."""
    wrapped = wrap(
        f"{label:<{_LABEL}} {shown(text)}",
        console.width,
        subsequent_indent=" " * (_LABEL + 1),
        break_long_words=False,
        break_on_hyphens=False,
    )
    # A path or command longer than the screen stays whole, to be copied.
    console.print("\n".join(wrapped), markup=False, soft_wrap=True)


def _on_screen(table: Table) -> ScreenTable:
    title = f"{table.title}: {table.caption}"
    screen = ScreenTable(
        title=title,
        title_justify="left",
        title_style="",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
    )
    for place, heading in enumerate(table.headings):
        longest = max(len(heading.text), *(len(row[place].full_text) for row in table.rows))
        # Only the name of a cell may need more than a line.
        least = min(_CELL_WIDTH, longest) if heading.text == "cell" else longest
        screen.add_column(
            heading.text, justify="right" if heading.is_number else "left", overflow="fold", min_width=least
        )
    for row in table.rows:
        screen.add_row(*(entry.full_text for entry in row))
    return screen
