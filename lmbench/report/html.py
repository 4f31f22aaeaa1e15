"""An answer as one HTML page that needs nothing else and may load nothing, and as a piece of HTML for a notebook."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from lmbench.masking import masked_message
from lmbench.report.answer import Answer, Cell, Column, Line, Table
from lmbench.text import shown, shown_lines

_COLOURS = {"FAIL": "#c5221f", "WARN": "#b06000"}


def page(answer: Answer) -> str:
    """The whole page. The same answer gives the same text."""
    from markupsafe import Markup

    charts = [chart for part in (answer, *answer.sections) for chart in part.charts]
    scripts = [_file("table.js")]
    if charts:
        from lmbench.report import vega

        scripts = [vega.javascript(), *scripts]
    parts = (answer, *answer.sections)
    sections = [part for part in parts if part.title or part.headline or part.tables or part.charts]
    text = _template().render(
        title=", ".join(part.title for part in sections if part.title),
        style=Markup(_file("page.css")),
        sections=sections,
        table=lambda table: Markup(_table(table)),
        chart=lambda chart: Markup(vega.fragment(chart.spec)),
        masked=masked_message,
        scripts=[Markup(script) for script in scripts],
        script_source=" ".join(map(_script_hash, scripts)),
    )
    return shown_lines(text)


def fragment(answer: Answer) -> str:
    """A piece of HTML for a notebook's cell: no script, no style sheet, everything in it escaped."""
    tables = (f"<div style='overflow-x:auto'>{_table(table)}</div>" for table in answer.tables)
    return f'<div class="lmbench">{_lines(answer.headline)}{"".join(tables)}{_lines(answer.notes)}</div>'


def _lines(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        colour = f";color:{_COLOURS[line.label]}" if line.label in _COLOURS else ""
        label, text = escape(shown(line.label)), escape(shown(masked_message(line.text)))
        style = f'style="text-align:left;vertical-align:top{colour}"'
        rows.append(f'<tr><th {style}>{label}</th><td style="text-align:left">{text}</td></tr>')
    return f"<table><tbody>{''.join(rows)}</tbody></table>" if rows else ""


def _table(table: Table) -> str:
    """One table with its notes; alignment stands in the cells, so that it needs no style sheet."""
    head = "".join(
        f'<th scope="col"{_class("number" if column.is_number else "")}{_side(column)}>{escape(column.heading)}</th>'
        for column in table.columns
    )
    body = []
    for place, (row, texts) in enumerate(zip(table.rows, table.texts(), strict=True)):
        cells = (
            f"<td{_class(cell.style if isinstance(cell, Cell) else '')}{_side(column)}>{escape(text)}</td>"
            for column, cell, text in zip(table.columns, row, texts, strict=True)
        )
        is_total = table.has_total and place == len(table.rows) - 1
        body.append(f"<tr{_class('total' if is_total else '')}>{''.join(cells)}</tr>")
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    caption = f'<caption style="text-align:left"><strong>{escape(shown(table.title))}</strong> '
    return (
        f"<table>{caption}{escape(shown(table.caption))}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        + (f'<ol class="notes">{notes}</ol>' if notes else "")
    )


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _side(column: Column) -> str:
    return ' style="text-align:right"' if column.is_number else ""


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return environment.from_string(_file("answer.html"))


@cache
def _file(name: str) -> str:
    return (files("lmbench.report") / name).read_text(encoding="utf-8")


def _script_hash(script: str) -> str:
    """What a content security policy calls this one script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
