"""Every format of an answer, made in one place: terminal, Markdown, CSV, JSON, LaTeX and a page of HTML."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from lmbench.errors import UsageError, suggest, tell
from lmbench.masking import masked_message
from lmbench.report.answer import BLANK, Answer, Line, Table
from lmbench.standard_output import write_result
from lmbench.text import one_line, shown, shown_json

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
        table: only these tables, by their names, separated by commas.
        all: every table and note, where the screen would hold the answer alone.
    """

    format: str | None = None
    output: Path | None = None
    table: str = ""
    all: bool = False

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in FORMATS:
            choices = ", ".join(FORMATS)
            raise UsageError(f"--format is {self.format!r}; choose among {choices}{suggest(self.format, FORMATS)}")
        if self.output is not None and (self.output.is_dir() or not self.output.absolute().parent.is_dir()):
            raise UsageError(f"--output {str(self.output)!r} cannot be written; name a file in a folder that exists")
        if self.table and self.all:
            raise UsageError("--all has every table; leave --table out")

    @property
    def form(self) -> str:
        """The format, or the one that the file's ending stands for."""
        if self.format is not None:
            return self.format
        return "terminal" if self.output is None else _SUFFIXES.get(self.output.suffix.lower(), "terminal")


def give(answer: Answer, output: Output) -> int:
    """Print the answer, or write it to a file; returns the command's exit code.

    Raises:
        UsageError: a table was asked for that there is none of, or the file cannot be written.
    """
    chosen = _chosen(answer, output)
    if output.form == "terminal" and output.output is None:
        from lmbench.report.console import make_console

        if sys.stdout is not None:
            print_answer(chosen, make_console())
        return answer.exit_code
    text = render(chosen, output.form)
    if output.output is None:
        write_result(text)
        return answer.exit_code
    try:
        output.output.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = f"{error.strerror}; choose another file"
        raise UsageError(f"--output {str(output.output)!r} cannot be written: {reason}") from error
    tell(f"written to {output.output}")
    return answer.exit_code


def _chosen(answer: Answer, output: Output) -> Answer:
    """The answer with what was asked for of it."""
    tables = answer.all_tables()
    known = list(dict.fromkeys(table.name for table in tables))
    names = [name.strip() for name in output.table.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"--table {name!r} is unknown here; choose among {', '.join(known)}{suggest(name, known)}")
    if names:
        return Answer(tables=[table for table in tables if table.name in names], title=answer.title)
    if output.all or output.form != "terminal":
        return answer
    answer = replace(answer, sections=[_chosen(section, output) for section in answer.sections])
    if answer.first is None:
        return answer
    more = Line("tables", f"{', '.join(known)}; --table NAME or --all")
    shown_tables = [table for table in answer.tables if table.name in answer.first]
    blank = [BLANK] if shown_tables else []
    return replace(answer, tables=shown_tables, notes=[*blank, more] if known else [], first=None)


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
    if answer.tables and answer.notes and answer.notes[0] != BLANK:
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
    return "\n".join(_markdown_parts(answer)).strip() + "\n"


def _markdown_parts(answer: Answer) -> list[str]:
    parts = [f"## {escaped(answer.title)}", ""] if answer.title else []
    parts += _markdown_lines(answer.headline)
    for table in answer.tables:
        parts += ["", *_markdown_table(table)]
    if answer.notes:
        parts += ["", *_markdown_lines(answer.notes)]
    for section in answer.sections:
        parts += ["", *_markdown_parts(section)]
    return parts


def _markdown_lines(lines: Iterable[Line]) -> list[str]:
    """A list with an item for each label; what goes on with a line stays in its item, after a line break."""
    written: list[str] = []
    for line in lines:
        if line == BLANK:
            written.append("")
        elif line.label:
            written.append(f"- **{escaped(line.label)}**: {escaped(masked_message(line.text))}")
        elif written and written[-1]:
            written[-1] += "  "
            written.append(f"  {escaped(masked_message(line.text))}")
        else:
            written.append(escaped(masked_message(line.text)))
    return written


def _markdown_table(table: Table) -> list[str]:
    titles = [escaped(column.heading) for column in table.columns]
    rows = [[escaped(text) for text in row] for row in table.texts()]
    widths = [max(3, *map(len, values)) for values in zip(titles, *rows, strict=True)]
    is_number = [column.is_number for column in table.columns]
    rules = [f"{'-' * (width - 1)}{':' if right else '-'}" for width, right in zip(widths, is_number, strict=True)]

    def line(texts: Sequence[str]) -> str:
        cells = zip(texts, widths, is_number, strict=True)
        return f"| {' | '.join(f'{text:>{width}}' if right else f'{text:<{width}}' for text, width, right in cells)} |"

    caption = f": {escaped(table.caption)}" if table.caption else ""
    lines = [f"**{escaped(table.title)}**{caption}", "", line(titles), line(rules), *map(line, rows)]
    notes = [f"[{number}] {escaped(note)}" for number, note in enumerate(table.notes, start=1)]
    return [*lines, "", "  \n".join(notes)] if notes else lines


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line: no tag, entity, table cell, link or picture of its own."""
    text = re.sub(r"&(?=#?\w+;)", "&amp;", one_line(text))
    for character, written in (
        ("\\", "\\\\"),
        ("|", "\\|"),
        ("<", "&lt;"),
        ("*", "\\*"),
        ("](", "]\\("),
        ("![", "!\\["),
    ):
        text = text.replace(character, written)
    return text


# LaTeX

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "#": r"\#", "_": r"\_", "$": r"\$",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


def _latex(answer: Answer) -> str:
    """The tables, for a document with the package booktabs."""
    return "\n".join(_latex_table(table) for table in answer.all_tables())


def _latex_table(table: Table) -> str:
    rows = [" & ".join(map(_latex_text, row)) + r" \\" for row in table.texts()]
    if table.has_total and len(rows) > 1:
        rows.insert(-1, r"\midrule")
    places = "".join("r" if column.is_number else "l" for column in table.columns)
    headings = " & ".join(_latex_text(column.heading) for column in table.columns)
    caption = ": ".join(filter(None, [table.title, table.caption]))
    notes = [rf"\par\footnotesize [{number}] {_latex_text(note)}" for number, note in enumerate(table.notes, start=1)]
    return "\n".join(
        [
            r"\begin{table}", rf"\caption{{{_latex_text(caption)}}}", r"\centering", rf"\begin{{tabular}}{{{places}}}",
            r"\toprule", headings + r" \\", r"\midrule", *rows, r"\bottomrule",
            r"\end{tabular}", *notes, r"\end{table}", "",
        ]
    )  # fmt: skip


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in shown(text))


# CSV and JSON

#: How a formula begins (https://owasp.org/www-community/attacks/CSV_Injection), the wide forms of East Asia included.
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def _csv(answer: Answer) -> str:
    """The answer's data, or its first table, in SI units (RFC 4180 but for plain line feeds)."""
    tables = [answer.data()] if answer.data is not None else answer.all_tables()
    stream = io.StringIO()
    for table in tables[:1]:
        writer = csv.writer(stream, lineterminator="\n")
        records = table.records()
        writer.writerow(map(csv_field, records[0] if records else [column.key for column in table.columns]))
        writer.writerows([csv_field(value) for value in record.values()] for record in records)
    return stream.getvalue()


def csv_field(value: Any) -> Any:
    """A value as a field of CSV. Text that a spreadsheet would take for a formula has an apostrophe before it, which
    makes it text there; a number that is written as text stays one."""
    if not isinstance(value, str):
        return value
    text = shown(value)
    return text if not text.startswith(_FORMULA) or _is_number(text) else f"'{text}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _json(answer: Answer) -> str:
    return shown_json(json.dumps(_plain(answer), indent=1, allow_nan=False)) + "\n"


def _plain(answer: Answer) -> dict[str, Any]:
    """An answer as plain values: the headline's sentences, its figures, and every table as rows of SI values."""
    tables = [*answer.tables, *([answer.data()] if answer.data is not None else [])]
    plain: dict[str, Any] = {
        "title": answer.title,
        **_finite(msgspec.to_builtins(dict(answer.figures), str_keys=True)),
        "headline": [[line.label, masked_message(line.text)] for line in answer.headline if line != BLANK],
        "tables": _finite({name: _rows(tables, name) for name in dict.fromkeys(table.name for table in tables)}),
        "notes": [[line.label, masked_message(line.text)] for line in answer.notes if line != BLANK],
        "sections": [_plain(section) for section in answer.sections],
    }
    return {name: value for name, value in plain.items() if value not in ("", [], {})}


def _rows(tables: Iterable[Table], name: str) -> list[dict[str, Any]]:
    """Rows of all tables of one name; where there are several (a table a phase), each row says which."""
    same = [table for table in tables if table.name == name]
    return [{"table": table.title, **row} if len(same) > 1 else dict(row) for table in same for row in table.records()]


def _finite(tree: Any) -> Any:
    """JSON knows neither NaN nor infinity: they are null."""
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


# HTML and SVG


def _html(answer: Answer) -> str:
    from lmbench.report.html import page

    return page(answer)


def _svg(answer: Answer) -> str:
    """The first chart, as a picture of its own."""
    from lmbench.report import vega

    charts = [chart for part in (answer, *answer.sections) for chart in part.charts]
    if not charts:
        raise UsageError("there is no chart here; choose another format")
    return vega.svg(charts[0].spec)


FORMATS: dict[str, Callable[[Answer], str]] = {
    "terminal": _terminal, "markdown": _markdown, "csv": _csv, "json": _json, "latex": _latex, "html": _html,
    "svg": _svg,
}  # fmt: skip
