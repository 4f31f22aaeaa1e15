"""Tables and labelled lines on a screen of any width, and the console that they are printed on."""

from __future__ import annotations

import shutil
import sys
from textwrap import wrap
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as ScreenTable
from rich.text import Text

from lmbench.report.table import Table
from lmbench.report.text import shown

_LABEL = 10
_CELL_WIDTH = 16
_ANY_WIDTH = 10_000


class _Console(Console):
    """Goes quiet when its reader goes away (`| head`), where rich's own would end the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def make_console(stream: IO[str] | None = None) -> Console:
    """A console that stays readable in a log file: never wider than 100 columns, no colour unless on a terminal."""
    width = min(100, shutil.get_terminal_size((80, 24)).columns)
    return _Console(file=stream or sys.stdout, width=max(80, width), highlight=False, soft_wrap=False)


def print_table(table: Table, console: Console, *, is_airy: bool = False) -> None:
    """Print a table whole: one wider than the screen is not cropped, which would falsify its figures.

    Args:
        is_airy: whether there is room for a third blank between columns.
    """
    screen, width = _on_screen(table, is_airy), console.width
    needed = console.measure(screen, options=console.options.update_width(_ANY_WIDTH)).minimum
    console.width = max(width, needed)
    with console.capture() as capture:
        console.print(screen)
    console.width = width
    for line in capture.get().splitlines():
        # Its codes, if it has any, are in it already.
        console.out(line.rstrip(), highlight=False)


def print_line(
    label: str, text: str, console: Console, *, width: int = _LABEL, style: str = "", is_whole: bool = False
) -> None:
    """Print a labelled line, folded under itself; a path or command longer than the screen stays whole.

    Args:
        width: of the label.
        style: of the label, on a terminal.
        is_whole: whether all of the text is to be copied, and is not folded at all.
    """
    line, indent = f"{label:<{width}} {shown(text)}", " " * (width + 1)
    if not is_whole:
        # A path or command longer than the screen stays whole, to be copied.
        pieces = wrap(line, console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        line = "\n".join(pieces)
    printed = Text(line)
    if style:
        printed.stylize(style, 0, width + 1)
    console.print(printed, soft_wrap=True)


def _on_screen(table: Table, is_airy: bool) -> ScreenTable:
    screen = ScreenTable(
        title=f"{table.title}: {table.caption}" if table.caption else table.title,
        title_justify="left",
        title_style="",
        box=SIMPLE_HEAD,
        padding=(0, 1) if is_airy else (0, 1, 0, 0),
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
    for place, row in enumerate(table.rows):
        if table.has_total and place == len(table.rows) - 1:
            screen.add_section()
        screen.add_row(*(entry.full_text for entry in row))
    return screen
