"""A run as a piece of HTML, for a notebook's cell: no script, no style sheet, everything in it escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from lmbench.masking import masked_message
from lmbench.records.run import RunRecord
from lmbench.report.table import Heading, Line, Table
from lmbench.report.terminal import banner, details, headline, phase_table, step_of, where
from lmbench.text import shown

_COLOURS = {"FAIL": "#c5221f", "WARN": "#b06000"}


def run_html(run: RunRecord, path: Path | None, notes: Sequence[Line] = ()) -> str:
    """What `print_run` prints, as HTML; `path` is None where there is no result folder (any more)."""
    step = step_of(run)
    parts = [
        _lines([*banner(run), *headline(run)]),
        _table(phase_table(run, step)) if step is not None else "",
        _lines([*details(run), *notes]),
        _lines(where(run, path) if path is not None else []),
    ]
    return f'<div class="lmbench">{"".join(parts)}</div>'


def _lines(lines: Sequence[Line]) -> str:
    rows = []
    for label, text in lines:
        colour = f";color:{_COLOURS[label]}" if label in _COLOURS else ""
        rows.append(
            f'<tr><th style="text-align:left;vertical-align:top{colour}">{_escaped(label)}</th>'
            f'<td style="text-align:left">{_escaped(text)}</td></tr>'
        )
    return f"<table><tbody>{''.join(rows)}</tbody></table>" if rows else ""


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col" style="{_side(each)}">{_escaped(each.text)}</th>' for each in table.headings)
    rows = []
    for place, row in enumerate(table.rows):
        border = ";border-top:1px solid" if table.has_total and place == len(table.rows) - 1 else ""
        cells = (
            f'<td style="{_side(heading)}{border}">{_escaped(entry.full_text)}</td>'
            for heading, entry in zip(table.headings, row, strict=True)
        )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    caption = f'<caption style="text-align:left">{_escaped(table.title)}</caption>'
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _side(heading: Heading) -> str:
    return f"text-align:{'right' if heading.is_number else 'left'}"


def _escaped(text: str) -> str:
    return escape(shown(masked_message(text)))
