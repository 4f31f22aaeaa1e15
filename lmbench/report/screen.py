"""Tables and labelled lines on a screen of any width."""

from __future__ import annotations

from textwrap import wrap

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as ScreenTable
from rich.text import Text

from lmbench.report.table import Table
from lmbench.report.text import shortened, shown

_LABEL = 10
_GAP = 2
#: A name of a cell may take more than one line, each of this width or more.
_CELL_WIDTH = 16
#: Another word keeps this much of its beginning and end.
_WORD_WIDTH = 12
_ANY_WIDTH = 10_000


def print_table(table: Table, console: Console) -> None:
    """Print title and caption, folded, and below them the table whole.

    Where it is too wide for the screen its longest words are shortened; one that still is wider is not cropped, which
    would falsify its figures.
    """
    console.out("")
    for line in wrap(f"{table.title}: {table.caption}", console.width):
        console.out(line, highlight=False)
    screen, width = _on_screen(table, console.width), console.width
    needed = console.measure(screen, options=console.options.update_width(_ANY_WIDTH)).minimum
    console.width = max(width, needed)
    with console.capture() as drawn:
        console.print(screen)
    console.width = width
    for line in drawn.get().splitlines():
        console.out(line.rstrip(), highlight=False)


def print_line(label: str, text: str, console: Console) -> None:
    """Print a labelled line, folded beside its label; a path or command longer than the screen stays whole, to be
    copied."""
    room = console.width - _LABEL - 1
    for place, piece in enumerate(wrap(shown(text), room, break_long_words=False, break_on_hyphens=False)):
        console.out(f"{'' if place else label:<{_LABEL}} {piece}", highlight=False)


def _on_screen(table: Table, width: int) -> ScreenTable:
    screen = ScreenTable(box=SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), show_edge=False, pad_edge=False)
    rows = [[entry.full_text for entry in row] for row in table.rows]
    headings = [heading.text for heading in table.headings]
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    words = []
    for place, heading in enumerate(table.headings):
        if heading.text == "cell":
            widths[place] = min(_CELL_WIDTH, widths[place])
        elif not heading.is_number:
            words.append(place)
    while words and sum(widths) + _GAP * (len(widths) - 1) > width:
        widest = max(words, key=widths.__getitem__)
        if widths[widest] <= _WORD_WIDTH:
            break
        widths[widest] -= 1
    for heading, least in zip(table.headings, widths, strict=True):
        screen.add_column(
            Text(heading.text), justify="right" if heading.is_number else "left", overflow="fold", min_width=least
        )
    for row in rows:
        # As text, where a string would be markup: `add[float]` has no style in it.
        screen.add_row(*(Text(shortened(text, widths[at]) if at in words else text) for at, text in enumerate(row)))
    return screen
