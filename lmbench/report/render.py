"""An answer in any format: terminal, Markdown, CSV, JSON, LaTeX, an HTML page, or its first chart as SVG."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmbench.errors import UsageError, check_known, tell, unknown
from lmbench.masking import masked_message, one_line, shown, shown_json
from lmbench.records.codec import indented_json
from lmbench.records.vocabulary import Values
from lmbench.report import shipped
from lmbench.report.answer import BLANK, Answer, Column, Line, Table, labelled
from lmbench.report.page import page, svg, template
from lmbench.standard_output import write_result


@dataclass(frozen=True)
class Output:
    """How an answer is given, the same for every command.

    Args:
        format: terminal, markdown, csv, json, latex, html or svg (the first chart); by default what the ending of
            `output` says.
        output: write to this file instead of the screen.
        table: only the table of this name.
        all: show every table and note; by default the screen has the answer alone.
    """

    format: str | None = None
    output: Path | None = None
    table: str = ""
    all: bool = False

    def __post_init__(self) -> None:
        if self.format is not None:
            check_known("--format", self.format, FORMATS)
        if self.output is not None and (self.output.is_dir() or not self.output.absolute().parent.is_dir()):
            raise UsageError(f"--output {str(self.output)!r} cannot be written; name a file in a folder that exists")
        if self.format is None and self.ending not in ("", *_FORMS):
            raise unknown("ending of --output", self.ending, _FORMS)

    @property
    def ending(self) -> str:
        """The ending of the file to write, empty without one."""
        name = self.output.name.lower() if self.output else ""
        return ".json.gz" if name.endswith(".json.gz") else Path(name).suffix

    @property
    def form(self) -> str:
        """The format asked for, or else the one that the file's ending stands for: one of FORMATS, or `trace`."""
        return self.format or _FORMS.get(self.ending, "terminal")


def give(answer: Answer, output: Output) -> int:
    """Print the answer, or write it to a file; returns the command's exit code.

    Raises:
        UsageError: `--table` names no table of the answer, or the file cannot be written.
    """
    chosen = _chosen(answer, output)
    if output.output is not None:
        make = answer.trace if output.form == "trace" else lambda: render(chosen, output.form).encode()
        if make is None:
            raise UsageError(f"--output {str(output.output)!r} is a trace, which this answer has not; `--path` has one")
        try:
            output.output.write_bytes(make())
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
    """The part of the answer that the options ask for."""
    names = list(dict.fromkeys(table.name for table in answer.all_tables()))
    if output.table:
        check_known("--table", output.table, names)
        tables = [table for table in answer.all_tables() if table.name == output.table]
        return Answer(tables=tables, title=answer.title)
    if output.all or output.form != "terminal":
        return answer
    answer = replace(answer, sections=[_chosen(section, output) for section in answer.sections])
    if answer.first is None:
        return answer
    first_tables = [table for table in answer.tables if table.name in answer.first]
    hint = labelled("tables", names and f"{', '.join(names)}; --table NAME or --all")
    return replace(answer, tables=first_tables, notes=hint)


def render(answer: Answer, form: str) -> str:
    """The whole answer in this format, as text that ends in a line feed."""
    make, _ = FORMATS[form]
    return make(answer)


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
    for index, section in enumerate(answer.sections):
        if index or answer.headline or answer.tables:
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
    """A list with an item for each label; a line without a label continues the item, after a line break."""
    items = []
    for line in lines:
        text = escaped(masked_message(line.text))
        if line.label:
            items.append(f"- **{escaped(line.label)}**: {text}")
        elif text and items and items[-1]:
            items[-1:] = [f"{items[-1]}  ", f"  {text}"]
        else:
            items.append(text)
    return items


def _markdown_table(table: Table) -> list[str]:
    columns = table.columns
    texts = [[escaped(text) for text in row] for row in ([column.heading for column in columns], *table.texts())]
    widths = [max(3, *map(len, values)) for values in zip(*texts, strict=True)]
    rule = [
        "-" * (width - 1) + (":" if column.is_number else "-") for column, width in zip(columns, widths, strict=True)
    ]
    lines = [f"| {' | '.join(map(Column.padded, columns, row, widths))} |" for row in (texts[0], rule, *texts[1:])]
    caption = f": {escaped(table.caption)}" if table.caption else ""
    notes = [f"[{number}] {escaped(note)}" for number, note in enumerate(table.notes, start=1)]
    return [f"**{escaped(table.title)}**{caption}", "", *lines, *(["", "  \n".join(notes)] if notes else [])]


def escaped(text: str) -> str:
    """The text on one line, escaped so that Markdown makes no tag, entity, table cell, link or picture of it."""
    text = re.sub(r"&(?=#?\w+;)", "&amp;", one_line(text)).replace("<", "&lt;")
    return re.sub(r"[\\|*]|(?<=\])[(:]|(?<=!)\[", r"\\\g<0>", text)


# LaTeX


def _latex(answer: Answer) -> str:
    """The tables, each on its own, after the line that their document needs."""
    escapes = str.maketrans(json.loads(shipped("latex.json")))

    def tex_text(value: object) -> str:
        # Two hyphens would become a dash, so that an option could not be copied; one before a number is a minus.
        text = re.sub("-(?=-)", "-{}", shown(str(value)).translate(escapes))
        return re.sub(r"(?<![^\s(])-(?=\d)", "$-$", text)

    tex = template(
        "table.tex", keep_trailing_newline=True, finalize=tex_text, block_start_string="<%", block_end_string="%>",
        variable_start_string="<<", variable_end_string=">>",
    )  # fmt: skip
    return "\n".join(["% \\usepackage{booktabs}", *(tex.render(table=table) for table in answer.all_tables())])


# CSV and JSON

_NUMBER = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?", re.IGNORECASE)
#: The first characters of a formula (https://owasp.org/www-community/attacks/CSV_Injection), fullwidth forms included.
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def _csv(answer: Answer) -> str:
    """The answer's data, or else its first table, in SI units (RFC 4180, but with plain line feeds)."""
    table = answer.data() if answer.data is not None else next(iter(answer.all_tables()), None)
    stream = io.StringIO()
    if table is not None:
        writer = csv.writer(stream, lineterminator="\n")
        records = table.records()
        keys = [key for key in records[0] if any(record[key] is not None for record in records)] if records else []
        writer.writerow(map(csv_field, keys or [column.key for column in table.columns]))
        if keys:
            writer.writerows([csv_field(record[key]) for key in keys] for record in records)
    return stream.getvalue()


def csv_field(value: Any) -> Any:
    """A value as a field of CSV. An apostrophe before text that a spreadsheet would take for a formula makes it text
    there. A number in a string stays a number."""
    if not isinstance(value, str):
        return value
    text = shown(value)
    is_formula = text.startswith(_FORMULA) and not _NUMBER.fullmatch(text)
    return f"'{text}" if is_formula else text


def _json(answer: Answer) -> str:
    # msgspec writes null for NaN and infinity, which JSON lacks. NumPy scalars become Python's.
    return shown_json(indented_json(_plain(answer)))


def _plain(answer: Answer) -> Values:
    """An answer as plain values: the headline, the figures, and every table as rows of SI values.

    Tables of the same name (one for each phase) are joined; each row then has the title of its table.
    """
    tables = [*answer.tables, *([answer.data()] if answer.data is not None else [])]
    names = Counter(table.name for table in tables)
    rows: dict[str, list[Any]] = {name: [] for name in names}
    for table in tables:
        title = {"table": table.title} if names[table.name] > 1 else {}
        rows[table.name] += [title | record for record in table.records()]
    plain: Values = {
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
    """The first chart as a picture."""
    charts = [chart for part in (answer, *answer.sections) for chart in part.charts()]
    if not charts:
        raise UsageError("there is no chart here; choose another format")
    return svg(charts[0])


#: The function that writes an answer in each format, and the ending of its files.
FORMATS = {
    "terminal": (_terminal, ".txt"), "markdown": (_markdown, ".md"), "csv": (_csv, ".csv"), "json": (_json, ".json"),
    "latex": (_latex, ".tex"), "html": (page, ".html"), "svg": (_svg, ".svg"),
}  # fmt: skip
#: Formats by the ending of a file.
_FORMS = {ending: name for name, (_, ending) in FORMATS.items()} | {".json.gz": "trace"}
