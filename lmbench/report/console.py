"""Answers on a terminal of any width: lines fold under themselves, tables keep to the width, no cell is ever cut."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile, zip_longest
from textwrap import TextWrapper, wrap
from typing import IO

from rich.console import Console
from rich.text import Text

from lmbench.masking import masked_message, shown
from lmbench.report.answer import BLANK, Column, Line, Table

#: Text is easier to read in lines of this width at most; tables use all of the terminal.
_WIDEST_TEXT, _NARROWEST = 100, 40
_LABEL_WIDTH = 12
_STYLES = {"FAIL": "bold red", "WARN": "yellow"}
#: What is wider folds where it has letters, between words and within those that are longer than that.
_WIDE, _LONG_WORD = 14, 20
#: Width of a kernel's name within a sentence.
KERNEL_WIDTH = 40


class _Pipe(Console):
    """A console that goes quiet when its reader goes away (`| head`), where rich's own would end the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def make_console(stream: IO[str] | None = None) -> Console:
    """A console as wide as the terminal, or as COLUMNS says, 80 elsewhere; no colour unless on a terminal."""
    width = max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns)
    # In a notebook rich would show each line by itself, and leave the stream empty.
    return _Pipe(
        file=stream or sys.stdout, width=width, highlight=False, markup=False, soft_wrap=True, force_jupyter=False
    )


def print_lines(lines: Iterable[Line], console: Console) -> None:
    """Print labelled lines, the labels in a column of their own; words longer than the screen (paths, commands) stay
    whole."""
    for line in lines:
        label = f"{shown(line.label):<{_LABEL_WIDTH}} " if line != BLANK else ""
        text = label + shown(masked_message(line.text))
        printed = Text(text if line.is_whole else _folded(text, console, " " * len(label)))
        printed.stylize(_STYLES.get(line.label, ""), 0, len(label))
        console.print(printed)


def print_text(text: str, console: Console) -> None:
    """Print a sentence without a label."""
    console.print(Text(_folded(shown(masked_message(text)), console, "")))


def _folded(text: str, console: Console, indent: str) -> str:
    width = min(_WIDEST_TEXT, console.width)
    return "\n".join(wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))


class _Fitted:
    """A column on its way to the screen: its texts, its heading first, its width, and the least that it can have."""

    def __init__(self, column: Column, texts: Sequence[str]) -> None:
        self.column, self.texts, self.width = column, texts, max(map(len, texts))
        words = [min(_LONG_WORD, len(word)) for text in texts for word in text.split()]
        # An interval has no letters.
        has_letters = re.search("[a-z]", "".join(texts[1:]))
        is_whole = column.is_number or column.is_extra or self.width <= _WIDE or not has_letters
        self.least = self.width if is_whole else max(words)


def print_table(table: Table, console: Console) -> None:
    """Print title and caption, the table, and its notes.

    Where it is too wide for the screen, columns that are extra are left out, with a line that names them and the width
    that shows them; generated names are shortened and paths folded; and columns that still have no room stand below,
    beside the first ones again.
    """
    rows = [[column.heading for column in table.columns], *table.texts()]
    fitted = [_Fitted(column, texts) for column, *texts in zip(table.columns, *rows, strict=True)]
    kept, needed = list(fitted), _total(part.least for part in fitted)
    while _total(part.least for part in kept) > console.width and any(part.column.is_extra for part in kept):
        kept.remove([part for part in kept if part.column.is_extra][-1])
    # Words and settings, which are shown as they are, tell rows apart; without figures the first column does.
    first = list(takewhile(lambda part: part.column.unit.text is str, kept))
    first = kept[:1] if len(first) == len(kept) or _total(part.least for part in first) > console.width / 2 else first
    blocks = [list(first)]
    for part in kept[len(first) :]:
        if len(blocks[-1]) > len(first) and _total(p.least for p in (*blocks[-1], part)) > console.width:
            blocks.append(list(first))
        blocks[-1].append(part)
    console.print()
    print_text(f"{table.title}: {table.caption}" if table.caption else table.title, console)
    for number, block in enumerate(blocks):
        if number:
            console.print()
        _print_block(block, len(rows), table.has_total, console)
    left_out = [part.column.title for part in fitted if part not in kept]
    if left_out:
        print_text(f"more with COLUMNS={needed}: {', '.join(left_out)}", console)
    print_lines((Line(f"[{number}]", note) for number, note in enumerate(table.notes, start=1)), console)


def _print_block(block: Sequence[_Fitted], row_count: int, has_total: bool, console: Console) -> None:
    """Print columns side by side, narrowed to the screen."""
    widths, limit = [part.width for part in block], max(console.width, _total(part.least for part in block))
    while _total(widths) > limit:
        widest = max((n for n, part in enumerate(block) if widths[n] > part.least), key=widths.__getitem__)
        widths[widest] -= 1
    for number in range(row_count):
        if has_total and number == row_count - 1:
            console.print()
        cells = [_pieces(part.texts[number], width, part.column) for part, width in zip(block, widths, strict=True)]
        for pieces in zip_longest(*cells, fillvalue=""):
            padded = [
                part.column.padded(piece, width) for piece, part, width in zip(pieces, block, widths, strict=True)
            ]
            console.print(Text("  ".join(padded).rstrip(), "" if number else "bold"))
        if not number:
            console.print("─" * _total(widths))


def _total(widths: Iterable[int]) -> int:
    """The width of a line of columns, two blanks between them."""
    return sum(width + 2 for width in widths) - 2


def _pieces(text: str, width: int, column: Column) -> list[str]:
    """A cell as lines of that width."""
    if column.is_shortened or len(text) <= width:
        return [shortened(text, width)]
    wrapper = TextWrapper(width, break_on_hyphens=False)
    # Paths break behind their separators.
    wrapper.wordsep_simple_re = re.compile(r"(\s+|(?<=[/.]))")
    return wrapper.wrap(text)


def shortened(text: str, width: int) -> str:
    """The text's beginning and end: generated names differ in their last digits."""
    tail = width // 3
    return text if len(text) <= width else f"{text[: width - tail - 2]}..{text[-tail:]}"
