"""Answers on a terminal of any width: long lines fold, tables are fitted to the width, and no cell is cut."""

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

#: Text folds at this width at most, since longer lines are hard to read; tables use the whole terminal. A terminal
#: counts as this wide at least.
_WIDEST_TEXT, _NARROWEST = 100, 40
_LABEL_WIDTH = 12
_STYLES = {"FAIL": "bold red", "WARN": "yellow"}
#: A column of words that is wider than _WIDE may fold: between words, and within words longer than _LONG_WORD, which is
#: the length of `accumulate_grad_batches`.
_WIDE, _LONG_WORD = 14, 23
#: The width of a kernel's name within a sentence.
KERNEL_WIDTH = 40


class _Pipe(Console):
    """A console that goes quiet when its reader ends (`| head`); rich's own console would end the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def make_console(stream: IO[str] | None = None) -> Console:
    """A console as wide as COLUMNS or the terminal says, else 80 columns; with colour on a terminal alone."""
    width = max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns)
    # In a notebook rich would show each line as an output of its own and leave the stream empty.
    return _Pipe(
        file=stream or sys.stdout, width=width, highlight=False, markup=False, soft_wrap=True, force_jupyter=False
    )


def print_lines(lines: Sequence[Line], console: Console) -> None:
    """Print labelled lines, with the labels in a column; words longer than the screen (paths, commands) stay whole."""
    width = max([_LABEL_WIDTH, *(len(shown(line.label)) for line in lines)])
    for line in lines:
        label = f"{shown(line.label):<{width}} " if line != BLANK else ""
        text = label + shown(masked_message(line.text))
        printed = Text(text if line.is_whole else _folded(text, console, " " * len(label)))
        printed.stylize(_STYLES.get(line.label, ""), 0, len(label))
        console.print(printed)


def print_text(text: str, console: Console) -> None:
    """Print a sentence without a label."""
    console.print(Text(_folded(shown(masked_message(text)), console, "")))


def _folded(text: str, console: Console, indent: str) -> str:
    width = min(_WIDEST_TEXT, console.width)
    # A percentage stays on one line.
    joined = text.replace(" %", "\N{NO-BREAK SPACE}%")
    lines = wrap(joined, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


class _Fitted:
    """A column that is fitted to the screen: its texts with the heading first, its full width and its least width."""

    def __init__(self, column: Column, texts: Sequence[str]) -> None:
        self.column, self.texts, self.width = column, texts, max(map(len, texts))
        words = [min(_LONG_WORD, len(word)) for text in texts for word in text.split()]
        # Intervals, which have no letters, stay on one line.
        has_letters = re.search("[a-z]", "".join(texts[1:]))
        is_whole = column.is_number or column.is_extra or self.width <= _WIDE or not has_letters
        self.least = self.width if is_whole else max(words)


def print_table(table: Table, console: Console) -> None:
    """Print title and caption, the table, and its notes.

    A table that is too wide for the screen loses its extra columns; a line names them and the width that shows them.
    Generated names are shortened and paths folded. Columns that still have no room go into blocks below, each of which
    repeats the leading columns that tell the rows apart.
    """
    rows = [[column.heading for column in table.columns], *table.texts()]
    fitted = [_Fitted(column, texts) for column, *texts in zip(table.columns, *rows, strict=True)]
    kept, full_width = list(fitted), _total(part.least for part in fitted)
    while _total(part.least for part in kept) > console.width and any(part.column.is_extra for part in kept):
        kept.remove([part for part in kept if part.column.is_extra][-1])
    # Words and settings may tell the rows apart; a column is repeated only if more rows differ with it.
    leading = kept[:1]
    for part in takewhile(lambda part: part.column.unit.text is str, kept):
        if _distinct_rows([*leading, part]) > _distinct_rows(leading):
            leading.append(part)
    if _total(part.least for part in leading) > console.width / 2:
        leading = kept[:1]
    blocks = [list[_Fitted]()]
    for part in kept:
        is_followed = any(other not in leading for other in blocks[-1])
        if is_followed and _total(p.least for p in (*blocks[-1], part)) > console.width:
            blocks.append(list(leading))
        if part not in blocks[-1]:
            blocks[-1].append(part)
    console.print()
    print_text(f"{table.title}: {table.caption}" if table.caption else table.title, console)
    for number, block in enumerate(blocks):
        if number:
            console.print()
        _print_block(block, len(rows), table.has_total, console)
    left_out = [part.column.title for part in fitted if part not in kept]
    if left_out:
        print_text(f"with {full_width} columns (COLUMNS={full_width}) also: {', '.join(left_out)}", console)
    print_lines([Line(f"[{number}]", note) for number, note in enumerate(table.notes, start=1)], console)


def _distinct_rows(columns: Iterable[_Fitted]) -> int:
    """The number of rows that differ in the texts of these columns."""
    return len({*zip(*(part.texts[1:] for part in columns), strict=True)})


def _print_block(block: Sequence[_Fitted], row_count: int, has_total: bool, console: Console) -> None:
    """Print columns side by side, the widest ones narrowed until all fit the screen."""
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
    """The width of columns side by side with two blanks between them."""
    return sum(width + 2 for width in widths) - 2


def _pieces(text: str, width: int, column: Column) -> list[str]:
    """A cell's text as lines of at most this width."""
    if column.is_shortened or len(text) <= width:
        return [shortened(text, width)]
    wrapper = TextWrapper(width, break_on_hyphens=False)
    # Paths may also break after a separator, but numbers not at their point.
    wrapper.wordsep_simple_re = re.compile(r"(\s+|(?<=/)|(?<=\.)(?!\d))")
    return wrapper.wrap(text)


def shortened(text: str, width: int) -> str:
    """The text's beginning and end, since generated names differ in their last digits."""
    tail = width // 3
    return text if len(text) <= width else f"{text[: width - tail - 2]}..{text[-tail:]}"
