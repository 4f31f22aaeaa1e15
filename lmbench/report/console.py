"""Answers on a terminal of any width: lines fold under themselves, tables keep to the width, no cell is ever cut."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import IO, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as ScreenTable
from rich.text import Text

from lmbench.masking import masked_message
from lmbench.report.answer import Column, Line, Table
from lmbench.text import shown

#: Text is easier to read in lines of this width at most; tables use all of the terminal.
_WIDEST_TEXT, _NARROWEST = 100, 40
_LABEL_WIDTH = 12
_STYLES = {"FAIL": "bold red", "WARN": "yellow"}
#: Least width of a word by how its column narrows.
_LEAST_WIDTH = {"fold": 20, "shorten": 12}
#: Width of a kernel's name within a sentence.
KERNEL_WIDTH = 40


class _Pipe(Console):
    """A console that goes quiet when its reader goes away (`| head`), where rich's own would end the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def make_console(stream: IO[str] | None = None) -> Console:
    """A console as wide as the terminal, or as COLUMNS says, 80 elsewhere; no colour unless on a terminal."""
    width = max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns)
    return _Pipe(file=stream or sys.stdout, width=width, highlight=False, markup=False, soft_wrap=True)


def print_lines(lines: Iterable[Line], console: Console) -> None:
    """Print labelled lines, the labels in a column of their own."""
    for line in lines:
        print_line(line, console)


def print_line(line: Line, console: Console) -> None:
    """Print one line, folded under its text; words longer than the screen (paths, commands) stay whole."""
    text = f"{shown(line.label):<{_LABEL_WIDTH}} {shown(masked_message(line.text))}" if line.label or line.text else ""
    if not line.is_whole:
        text = _folded(text, console, " " * (_LABEL_WIDTH + 1))
    printed = Text(text)
    if line.label in _STYLES:
        printed.stylize(_STYLES[line.label], 0, _LABEL_WIDTH + 1)
    console.print(printed)


def print_text(text: str, console: Console) -> None:
    """Print a sentence without a label."""
    console.print(Text(_folded(shown(masked_message(text)), console, "")))


def _folded(text: str, console: Console, indent: str) -> str:
    width = min(_WIDEST_TEXT, console.width)
    return "\n".join(wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))


def print_table(table: Table, console: Console) -> None:
    """Print title and caption, the table, and its notes.

    Where it is too wide for the screen, generated names are shortened and paths folded. If that is not enough, columns
    are left out, with a line that names them and the width that shows them.
    """
    console.print()
    print_text(f"{table.title}: {table.caption}" if table.caption else table.title, console)
    texts, columns = table.texts(), list(table.columns)
    drawn = _drawn(columns, texts, console.width, table.has_total)
    needed, left_out = _width(drawn, console), list[str]()
    whole = needed
    while needed > console.width and len(columns) > 1:
        place = _least_needed(columns)
        left_out.insert(0, columns.pop(place).title)
        texts = [[*row[:place], *row[place + 1 :]] for row in texts]
        drawn = _drawn(columns, texts, console.width, table.has_total)
        needed = _width(drawn, console)
    with console.capture() as captured:
        console.print(drawn, width=max(console.width, needed), soft_wrap=False)
    for line in captured.get().splitlines():
        console.print(Text.from_ansi(line.rstrip()))
    if left_out:
        count = f"{len(left_out)} more column{'s' * (len(left_out) > 1)}"
        print_text(f"{count} with COLUMNS={whole}: {', '.join(left_out)}", console)
    print_lines((Line(f"[{number}]", note) for number, note in enumerate(table.notes, start=1)), console)


def _width(drawn: ScreenTable, console: Console) -> int:
    return console.measure(drawn, options=console.options.update_width(10_000)).minimum


def _least_needed(columns: Sequence[Column]) -> int:
    """The column to leave out next: the last of those that are extra, else of numbers, else of all but the first."""
    later = range(1, len(columns))
    extra = [place for place in later if columns[place].is_extra]
    numbers = [place for place in later if columns[place].is_number]
    return max(extra or numbers or later)


def _drawn(columns: Sequence[Column], texts: Sequence[Sequence[str]], width: int, has_total: bool) -> ScreenTable:
    screen = ScreenTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    headings = [column.heading for column in columns]
    widths = [max(map(len, values)) for values in zip(headings, *texts, strict=True)]
    least = {place: _LEAST_WIDTH[each.narrowing] for place, each in enumerate(columns) if each.narrowing != "keep"}
    while sum(widths) + 2 * (len(widths) - 1) > width:
        wider = [place for place, enough in least.items() if widths[place] > enough]
        if not wider:
            break
        widths[max(wider, key=widths.__getitem__)] -= 1
    for column, title, own in zip(columns, headings, widths, strict=True):
        screen.add_column(Text(title), justify="right" if column.is_number else "left", overflow="fold", min_width=own)
    for place, row in enumerate(texts):
        if has_total and place == len(texts) - 1:
            screen.add_section()
        fitted: Any = map(_fitted, row, widths, columns)
        screen.add_row(*map(Text, fitted))
    return screen


def _fitted(text: str, width: int, column: Column) -> str:
    if column.narrowing == "shorten":
        return shortened(text, width)
    if column.narrowing == "fold" and len(text) > width:
        # Break opportunities after the separators of paths, the remaining too long parts anywhere.
        spaced = "".join(f"{each}\u200b" if each in "/._," else each for each in text)
        return "\n".join(_fill(spaced.split("\u200b"), width))
    return text


def _fill(parts: Iterable[str], width: int) -> list[str]:
    lines = [""]
    for part in parts:
        if len(lines[-1]) + len(part.rstrip()) > width:
            lines += [""]
        lines[-1] += part
    return [piece for line in lines for piece in (wrap(line, width) or [""]) if piece]


def shortened(text: str, width: int) -> str:
    """The text's beginning and end: generated names differ in their last digits."""
    tail = width // 3
    return text if len(text) <= width else f"{text[: width - tail - 2]}..{text[-tail:]}"
