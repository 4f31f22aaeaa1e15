"""The report as one HTML page that needs nothing else: styles and pictures are in it. Scripts sort tables and move
features' timelines; everything can be read without them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from lmbench.errors import UsageError
from lmbench.report.cells import Cell, outcome_label
from lmbench.report.charts import WHISKERS, Chart, build_charts
from lmbench.report.gather import Sample
from lmbench.report.sections import Report, Section, first_of
from lmbench.report.table import Table
from lmbench.text import shown_lines


@dataclass(frozen=True)
class Picture:
    """A chart with its drawing; `svg` is markup of our own making."""

    chart: Chart
    svg: str


def write_page(report: Report, target: Path) -> None:
    """Write the page.

    Raises:
        UsageError: the file cannot be written.
    """
    text = to_html(report)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {str(target)!r} cannot be written: {error.strerror}; choose another file") from error


def to_html(report: Report) -> str:
    """The page as text. The same results give the same page."""
    from markupsafe import Markup

    features = report.sections[0].catalogue.features if report.sections else ()
    parts = [feature.page_part() for feature in features if feature.page_part is not None]
    sections, has_whiskers = [], False
    for index, section in enumerate(report.sections):
        pictures, left_out = draw_charts(section)
        has_whiskers = has_whiskers or any(picture.chart.has_whiskers for picture in pictures)
        sections.append(
            {
                "section": section,
                "anchor": f"section-{index}",
                "pictures": [(picture.chart, Markup(picture.svg)) for picture in pictures],
                "left_out": left_out,
                "parts": [Markup(part.markup(section.cells)) for part in parts],
                "tables": [Markup(table_html(table)) for table in section.tables],
                "runs": [_run_row(cell, sample) for cell in section.cells for sample in (*cell.samples, *cell.passes)],
            }
        )
    whiskers = WHISKERS if has_whiskers else ""
    return shown_lines(
        whole_page(
            "report",
            ", ".join(section.title for section in report.sections),
            _rendered("page.html", sections=sections, unread=report.unread, first_of=first_of, whiskers=whiskers),
            "".join(part.style for part in parts),
            [part.script for part in parts if part.script],
        )
    )


def whole_page(command: str, title: str, body: str, style: str = "", scripts: Sequence[str] = ()) -> str:
    """A page that needs nothing else, and may load nothing.

    `body` and the styles and scripts that it needs beside the report's own are markup of our own making; `command` is
    what made it.
    """
    from markupsafe import Markup

    scripts = [*scripts, (files("lmbench.report") / "table.js").read_text(encoding="utf-8")]
    return _rendered(
        "frame.html",
        command=command,
        title=title,
        body=Markup(body),
        style=Markup(report_style() + style),
        scripts=[Markup(script) for script in scripts],
        script_source=f"; script-src {' '.join(map(_script_hash, scripts))}",
    )


def table_html(table: Table) -> str:
    """One table with its caption and notes, as it stands in a page."""
    return _rendered("table.html", table=table)


def report_style() -> str:
    """The style sheet of all pages; its first rules are the palette."""
    return (files("lmbench.report") / "page.css").read_text(encoding="utf-8")


def palette() -> str:
    """The colours of all pages, light and dark, for a picture in a file of its own."""
    return report_style().partition("* {")[0]


def _rendered(template: str, **values: Any) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return environment.from_string((files("lmbench.report") / template).read_text(encoding="utf-8")).render(values)


def _script_hash(script: str) -> str:
    """What a content security policy calls this one script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def draw_charts(section: Section) -> tuple[list[Picture], int]:
    """The section's charts, device by device, and how many were left out for there being too many."""
    from lmbench.report.figures import draw

    pictures, left_out = [], 0
    timed = sorted((cell for cell in section.cells if cell.samples), key=lambda cell: cell.gpu)
    for _, group in groupby(timed, key=lambda cell: cell.gpu):
        cells = list(group)
        for spec in section.view.charts:
            kind = section.catalogue.chart_kinds[spec.kind]
            charts, more = build_charts(spec, kind, cells, section.pairing, section.catalogue.column)
            left_out += more
            pictures += [Picture(chart, draw(chart)) for chart in charts]
    return pictures, left_out


def _run_row(cell: Cell, sample: Sample) -> dict[str, str]:
    return {
        "run_id": sample.run_id,
        "cell": cell.name,
        "outcome": outcome_label(sample),
        "replay": sample.record.replay_command or "",
    }
