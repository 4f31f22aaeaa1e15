"""Every format of an answer, made in one place: terminal, Markdown, CSV, JSON, LaTeX and a page of HTML."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from lmbench.errors import UsageError, tell, unknown
from lmbench.masking import masked_message, one_line, shown, shown_json
from lmbench.report import shipped
from lmbench.report.answer import BLANK, Answer, Column, Line, Table
from lmbench.report.page import page, svg, template
from lmbench.standard_output import write_result

_SUFFIXES = {
    ".md": "markdown", ".csv": "csv", ".json": "json", ".tex": "latex", ".html": "html", ".txt": "terminal",
    ".svg": "svg",
}  # fmt: skip


@dataclass(frozen=True)
class Output:
    """How an answer is given, the same for every command.

    Args:
        format: terminal, markdown, csv, json, latex, html or svg (the first chart); by default what the ending of
            `output` says.
        output: write to this file instead of the screen.
        table: only the table of this name.
        all: every table and note, where the screen would hold the answer alone.
    """

    format: str | None = None
    output: Path | None = None
    table: str = ""
    all: bool = False

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in FORMATS:
            raise unknown("--format", self.format, FORMATS)
        if self.output is not None and (self.output.is_dir() or not self.output.absolute().parent.is_dir()):
            raise UsageError(f"--output {str(self.output)!r} cannot be written; name a file in a folder that exists")

    @property
    def form(self) -> str:
        """The format, or the one that the file's ending stands for."""
        ending = self.output.suffix.lower() if self.output else ""
        return self.format or _SUFFIXES.get(ending, "terminal")


def give(answer: Answer, output: Output) -> int:
    """Print the answer, or write it to a file; returns the command's exit code.

    Raises:
        UsageError: a table was asked for that there is none of, or the file cannot be written.
    """
    chosen = _chosen(answer, output)
    if output.output is not None:
        try:
            output.output.write_text(render(chosen, output.form), encoding="utf-8")
        except OSError as error:
            reason = f"{error.strerror}; choose another file"
            raise UsageError(f"--output {str(output.output)!r} cannot be written: {reason}") from error
        tell(f"written to {output.output}")
    elif output.form != "terminal":
        write_result(render(chosen, output.form))
    elif sys.stdout is not None:
        from lmbench.report.console import make_console

        print_answer(chosen, make_console())
    return answer.exit_code


def _chosen(answer: Answer, output: Output) -> Answer:
    """The answer with what was asked for of it."""
    tables = {table.name: table for table in answer.all_tables()}
    if output.table:
        if output.table not in tables:
            raise unknown("--table", output.table, tables)
        chosen = [table for table in answer.all_tables() if table.name == output.table]
        return Answer(tables=chosen, title=answer.title)
    if output.all or output.form != "terminal":
        return answer
    answer = replace(answer, sections=[_chosen(section, output) for section in answer.sections])
    if answer.first is None:
        return answer
    shown_tables = [table for table in answer.tables if table.name in answer.first]
    more = [Line("tables", f"{', '.join(tables)}; --table NAME or --all")] if tables else []
    return replace(answer, tables=shown_tables, notes=more)


def render(answer: Answer, form: str) -> str:
    """The whole answer in a format, as text that ends in a line feed."""
    return FORMATS[form](answer)


# the terminal


def print_answer(answer: Answer, console: Any) -> None:
    """Print an answer on a rich console."""
    from lmbench.report.console import print_lines, print_table, print_text

    if answer.title:
        print_text(answer.title, console)
    print_lines(answer.headline, console)
    for table in answer.tables:
        print_table(table, console)
    if answer.tables and answer.notes:
        console.print()
    print_lines(answer.notes, console)
    for place, section in enumerate(answer.sections):
        if place or answer.headline or answer.tables:
            console.print()
        print_answer(section, console)


def _terminal(answer: Answer) -> str:
    from lmbench.report.console import make_console

    stream = io.StringIO()
    print_answer(answer, make_console(stream))
    return stream.getvalue()


# Markdown


def _markdown(answer: Answer) -> str:
    parts = [[f"## {escaped(answer.title)}"] if answer.title else [], _markdown_lines(answer.headline)]
    parts += [*map(_markdown_table, answer.tables), _markdown_lines(answer.notes)]
    parts += [[_markdown(section)] for section in answer.sections]
    return "\n\n".join("\n".join(part).strip() for part in parts if part) + "\n"


def _markdown_lines(lines: Iterable[Line]) -> list[str]:
    """A list with an item for each label; what goes on with a line stays in its item, after a line break."""
    written: list[str] = []
    for line in lines:
        text = escaped(masked_message(line.text))
        if line.label:
            written.append(f"- **{escaped(line.label)}**: {text}")
        elif text and written and written[-1]:
            written[-1:] = [f"{written[-1]}  ", f"  {text}"]
        else:
            written.append(text)
    return written


def _markdown_table(table: Table) -> list[str]:
    columns = table.columns
    texts = [[escaped(text) for text in row] for row in ([column.heading for column in columns], *table.texts())]
    widths = [max(3, *map(len, values)) for values in zip(*texts, strict=True)]
    rule = [f"{'-' * (width - 1)}{'-:'[column.is_number]}" for column, width in zip(columns, widths, strict=True)]
    lines = [f"| {' | '.join(map(Column.padded, columns, row, widths))} |" for row in (texts[0], rule, *texts[1:])]
    caption = f": {escaped(table.caption)}" if table.caption else ""
    notes = [f"[{number}] {escaped(note)}" for number, note in enumerate(table.notes, start=1)]
    return [f"**{escaped(table.title)}**{caption}", "", *lines, *(["", "  \n".join(notes)] if notes else [])]


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line: no tag, entity, table cell, link or picture of its own."""
    text = re.sub(r"&(?=#?\w+;)", "&amp;", one_line(text))
    for character, written in (
        ("\\", "\\\\"),
        ("|", "\\|"),
        ("<", "&lt;"),
        ("*", "\\*"),
        ("](", "]\\("),
        ("]:", "]\\:"),
        ("![", "!\\["),
    ):
        text = text.replace(character, written)
    return text


# LaTeX


def _latex(answer: Answer) -> str:
    """The tables, for a document with the package booktabs."""
    signs = str.maketrans(json.loads(shipped("latex.json")))
    table = template(
        "table.tex", keep_trailing_newline=True, finalize=lambda value: shown(str(value)).translate(signs),
        block_start_string="<%", block_end_string="%>", variable_start_string="<<", variable_end_string=">>",
    )  # fmt: skip
    return "\n".join(table.render(table=each) for each in answer.all_tables())


# CSV and JSON

#: How a formula begins (https://owasp.org/www-community/attacks/CSV_Injection), the wide forms of East Asia included.
_NUMBER = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?", re.IGNORECASE)
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def _csv(answer: Answer) -> str:
    """The answer's data, or its first table, in SI units (RFC 4180 but for plain line feeds)."""
    stream = io.StringIO()
    for table in ([answer.data()] if answer.data is not None else answer.all_tables())[:1]:
        writer = csv.writer(stream, lineterminator="\n")
        records = table.records()
        keys = [key for key in records[0] if any(record[key] is not None for record in records)] if records else []
        writer.writerow(map(csv_field, keys or [column.key for column in table.columns]))
        writer.writerows([csv_field(record[key]) for key in keys] for record in records)
    return stream.getvalue()


def csv_field(value: Any) -> Any:
    """A value as a field of CSV. Text that a spreadsheet would take for a formula has an apostrophe before it, which
    makes it text there; a number that is written as text stays one."""
    if not isinstance(value, str):
        return value
    text = shown(value)
    is_formula = text.startswith(_FORMULA) and not _NUMBER.fullmatch(text)
    return f"'{text}" if is_formula else text


def _json(answer: Answer) -> str:
    # JSON knows neither NaN nor infinity: msgspec writes null. NumPy's scalars are Python's.
    text = msgspec.json.encode(_plain(answer), enc_hook=lambda scalar: scalar.item())
    return shown_json(msgspec.json.format(text, indent=1).decode()) + "\n"


def _plain(answer: Answer) -> dict[str, Any]:
    """An answer as plain values: the headline's sentences, its figures, and every table as rows of SI values; of
    several tables of one name (a table a phase) each row says which."""
    tables = [*answer.tables, *([answer.data()] if answer.data is not None else [])]
    names = Counter(table.name for table in tables)
    rows: dict[str, list[Any]] = {name: [] for name in names}
    for table in tables:
        which = {"table": table.title} if names[table.name] > 1 else {}
        rows[table.name] += [which | record for record in table.records()]
    plain: dict[str, Any] = {
        "title": answer.title,
        **answer.figures,
        "headline": [[line.label, masked_message(line.text)] for line in answer.headline if line != BLANK],
        "tables": rows,
        "notes": [[line.label, masked_message(line.text)] for line in answer.notes],
        "sections": [_plain(section) for section in answer.sections],
    }
    return {name: value for name, value in plain.items() if value not in ("", [], {})}


# HTML and SVG


def _svg(answer: Answer) -> str:
    """The first chart, as a picture of its own."""
    charts = [chart for part in (answer, *answer.sections) for chart in part.charts()]
    if not charts:
        raise UsageError("there is no chart here; choose another format")
    return svg(charts[0].spec)


FORMATS: dict[str, Callable[[Answer], str]] = {
    "terminal": _terminal, "markdown": _markdown, "csv": _csv, "json": _json, "latex": _latex, "html": page,
    "svg": _svg,
}  # fmt: skip
