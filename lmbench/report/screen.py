"""Tables and labelled lines on a screen of any width, and the console that they are printed on."""

from __future__ import annotations

import shutil
import sys
from textwrap import wrap
from typing import IO, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as ScreenTable
from rich.text import Text

from lmbench.masking import masked_message
from lmbench.report.table import Heading, Table
from lmbench.report.text import folded, shortened
from lmbench.text import shown, shown_lines

_LABEL = 10
_GAP = 2
#: A name of a cell may take more than one line, each of this width or more.
_CELL_WIDTH = 16
#: A folded path's least width: a module's own name stays in one line.
_PATH_WIDTH = 20
#: Another word keeps this much of its beginning and end.
_WORD_WIDTH = 12
_ANY_WIDTH = 10_000


class _Console(Console):
    """Goes quiet when its reader goes away (`| head`), where rich's own would end the program.

    Strings are text, never markup (`add[float]` has no style in it), and what cannot be seen in them is written out.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(Text(shown_lines(each)) if isinstance(each, str) else each for each in objects), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True


def make_console(stream: IO[str] | None = None) -> Console:
    """A console that stays readable in a log file: never wider than 100 columns, no colour unless on a terminal."""
    width = min(100, shutil.get_terminal_size((80, 24)).columns)
    return _Console(file=stream or sys.stdout, width=max(80, width), highlight=False, soft_wrap=False)


def print_table(table: Table, console: Console, *, is_airy: bool = False) -> None:
    """Print title and caption, folded, and below them the table whole.

    Where it is too wide for the screen, generated names are shortened and paths folded; one that still is wider is not
    cropped, which would falsify its figures.

    Args:
        is_airy: whether there is room for a third blank between columns.
    """
    console.out("")
    for line in wrap(f"{table.title}: {table.caption}" if table.caption else table.title, console.width):
        console.out(line, highlight=False)
    screen, width = _on_screen(table, console.width, is_airy), console.width
    needed = console.measure(screen, options=console.options.update_width(_ANY_WIDTH)).minimum
    console.width = max(width, needed)
    with console.capture() as drawn:
        console.print(screen)
    console.width = width
    for line in drawn.get().splitlines():
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
    line, indent = f"{shown(label):<{width}} {shown(masked_message(text))}", " " * (width + 1)
    if not is_whole:
        # A path or command longer than the screen stays whole, to be copied.
        pieces = wrap(line, console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        line = "\n".join(pieces)
    printed = Text(line)
    if style:
        printed.stylize(style, 0, width + 1)
    console.print(printed, soft_wrap=True)


def _on_screen(table: Table, width: int, is_airy: bool) -> ScreenTable:
    padding = (0, 1) if is_airy else (0, _GAP - 1, 0, 0)
    screen = ScreenTable(box=SIMPLE_HEAD, padding=padding, show_edge=False, pad_edge=False)
    rows = [[entry.full_text for entry in row] for row in table.rows]
    headings = [heading.text for heading in table.headings]
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    least: dict[int, int] = {}
    for place, heading in enumerate(table.headings):
        if heading.text == "cell":
            widths[place] = min(_CELL_WIDTH, widths[place])
        elif heading.is_generated or heading.is_folded:
            least[place] = _WORD_WIDTH if heading.is_generated else _PATH_WIDTH
    while sum(widths) + _GAP * (len(widths) - 1) > width:
        narrower = [place for place, enough in least.items() if widths[place] > enough]
        if not narrower:
            break
        widths[max(narrower, key=widths.__getitem__)] -= 1
    for heading, own in zip(table.headings, widths, strict=True):
        screen.add_column(
            Text(heading.text), justify="right" if heading.is_number else "left", overflow="fold", min_width=own
        )
    for place, row in enumerate(rows):
        if table.has_total and place == len(rows) - 1:
            screen.add_section()
        # As text, where a string would be markup: `add[float]` has no style in it.
        screen.add_row(*map(Text, map(_fitted, row, widths, table.headings)))
    return screen


def _fitted(text: str, width: int, heading: Heading) -> str:
    if heading.is_generated:
        return shortened(text, width)
    return "\n".join(folded(text, width)) if heading.is_folded else text
