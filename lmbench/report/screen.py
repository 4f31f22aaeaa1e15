"""Tables and labelled lines on a screen of any width, and the console that they are printed on."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import IO, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as ScreenTable
from rich.text import Text

from lmbench.masking import masked_message
from lmbench.report.table import Heading, Part, Table
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


_WIDEST_TEXT = 100
_NARROWEST = 40
_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


class _Console(Console):
    """Goes quiet when its reader goes away (`| head`), where rich's own would end the program.

    Strings are text, never markup (`add[float]` has no style in it), and what cannot be seen in them is written out.
    """

    #: Of a table; text is easier to read in shorter lines.
    table_width = _WIDEST_TEXT

    def print(self, *objects: Any, **options: Any) -> None:
        if not options.get("soft_wrap") and not options.get("no_wrap"):
            objects = tuple(self._folded(each) if isinstance(each, str) else each for each in objects)
        super().print(*(Text(shown_lines(each)) if isinstance(each, str) else each for each in objects), **options)

    def _folded(self, text: str) -> str:
        """Without the blank that rich leaves at the end of a line that it folds."""
        return "\n".join(fold for line in text.split("\n") for fold in wrap(line, self.width, **_WHOLE_WORDS) or [""])

    def on_broken_pipe(self) -> None:
        self.quiet = True


def make_console(stream: IO[str] | None = None) -> Console:
    """A console as wide as the terminal, or as COLUMNS says, 80 elsewhere; text in it stays within 100 columns. No
    colour unless on a terminal."""
    width = max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns)
    file = stream or sys.stdout
    console = _Console(file=file, width=min(_WIDEST_TEXT, width), highlight=False, soft_wrap=False)
    console.table_width = width
    return console


def print_parts(parts: Iterable[Part], console: Console, *, whole: Collection[str] = ()) -> None:
    """Print lines and tables; a line whose label is in `whole` is not folded, to be copied."""
    for part in parts:
        if isinstance(part, Table):
            print_table(part, console)
        else:
            print_line(*part, console, is_whole=part[0] in whole)


def print_table(table: Table, console: Console, *, is_airy: bool = False) -> None:
    """Print title and caption, folded, and below them the table.

    Where it is too wide for the screen, generated names are shortened and paths folded. If that is not enough, columns
    are left out, with a line that names them and the width that shows them; no cell is ever cut.

    Args:
        is_airy: whether there is room for a third blank between columns.
    """
    console.out("")
    for line in wrap(f"{table.title}: {table.caption}" if table.caption else table.title, console.width):
        console.out(line, highlight=False)
    columns = getattr(console, "table_width", console.width)
    screen, needed = _drawn(table, console, columns, is_airy)
    whole, left_out = needed, list[str]()
    while needed > columns and len(table.headings) > 1:
        place = _least_needed(table.headings)
        left_out.insert(0, table.headings[place].text)
        table = _without(table, place)
        screen, needed = _drawn(table, console, columns, is_airy)
    width, console.width = console.width, max(columns, needed)
    with console.capture() as drawn:
        console.print(screen)
    console.width = width
    for line in drawn.get().splitlines():
        console.print(Text.from_ansi(line.rstrip()), soft_wrap=True)
    if left_out:
        count = f"{len(left_out)} more column{'s' * (len(left_out) > 1)}"
        for line in wrap(f"{count} with COLUMNS={whole}: {', '.join(left_out)}", console.width):
            console.out(line, highlight=False)


def _drawn(table: Table, console: Console, columns: int, is_airy: bool) -> tuple[ScreenTable, int]:
    """The table for a screen so wide, and the width that it takes all the same."""
    screen = _on_screen(table, columns, is_airy)
    return screen, console.measure(screen, options=console.options.update_width(_ANY_WIDTH)).minimum


def _least_needed(headings: Sequence[Heading]) -> int:
    """The column to leave out next: the last of those that are extra, else of numbers, else of all but the first."""
    later = range(1, len(headings))
    extra = [place for place in later if headings[place].is_extra]
    numbers = [place for place in later if headings[place].is_number]
    return max(extra or numbers or later)


def _without(table: Table, place: int) -> Table:
    """The table without a column."""
    rows = [[*row[:place], *row[place + 1 :]] for row in table.rows]
    return replace(table, headings=[*table.headings[:place], *table.headings[place + 1 :]], rows=rows)


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
