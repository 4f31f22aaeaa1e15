"""The report as one HTML page that needs nothing else: styles and pictures are in it. There is no script but the one
that zooms timelines, and they can be read without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from lmbench.errors import UsageError
from lmbench.kernels.shown.page_timelines import Timelines, script, script_hash
from lmbench.report.cells import Cell, outcome_label
from lmbench.report.chart import Chart
from lmbench.report.charts import build_charts
from lmbench.report.sample import Sample
from lmbench.report.sections import Report, Section
from lmbench.report.text import shown_lines


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
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    package = files("lmbench.report")
    template = environment.from_string((package / "page.html").read_text(encoding="utf-8"))
    style = Markup((package / "page.css").read_text(encoding="utf-8"))
    sections, timelines = [], Timelines()
    for index, section in enumerate(report.sections):
        pictures, left_out = draw_charts(section)
        drawn = timelines.of(section)
        sections.append(
            {
                "section": section,
                "anchor": f"section-{index}",
                "pictures": [(picture.chart, Markup(picture.svg)) for picture in pictures],
                "chart_notes": chart_notes(pictures, left_out),
                "timelines": [(step, Markup(step.svg)) for step in drawn.pictures],
                "timeline_notes": drawn.notes,
                "runs": [_run_row(cell, sample) for cell in section.cells for sample in (*cell.samples, *cell.passes)],
            }
        )
    title = ", ".join(section.title for section in report.sections)
    moving = script() if any(item["timelines"] for item in sections) else ""
    page = template.render(
        title=title,
        style=style,
        sections=sections,
        unread=report.unread,
        script=Markup(moving),
        script_source=f"; script-src '{script_hash(moving)}'" if moving else "",
    )
    return shown_lines(page)


def draw_charts(section: Section) -> tuple[list[Picture], int]:
    """The section's charts, device by device, and how many were left out for there being too many."""
    from lmbench.report.figures import draw

    pictures, left_out = [], 0
    timed = sorted((cell for cell in section.cells if cell.samples), key=lambda cell: cell.gpu)
    for _, group in groupby(timed, key=lambda cell: cell.gpu):
        cells = list(group)
        for spec in section.view.charts:
            charts, more = build_charts(spec, cells, section.pairing)
            left_out += more
            pictures += [Picture(chart, draw(chart)) for chart in charts]
    return pictures, left_out


def chart_notes(pictures: Sequence[Picture], left_out: int) -> list[str]:
    """What is said once below all charts of a section: what the whiskers are, and what is not drawn."""
    whiskers = dict.fromkeys((p.chart.y_label, p.chart.whiskers) for p in pictures if p.chart.whiskers)
    is_one = len({text for _, text in whiskers}) == 1
    notes = [f"Whiskers of {quantity}: {text}." for quantity, text in whiskers]
    if is_one:
        notes = [f"Whiskers: {next(iter(whiskers))[1]}."]
    if left_out:
        notes.append(f"{left_out} more charts are left out; the tables have all figures.")
    return notes


def _run_row(cell: Cell, sample: Sample) -> dict[str, str]:
    return {
        "run_id": sample.run_id,
        "cell": cell.name,
        "outcome": outcome_label(sample),
        "replay": str(sample.record.get("replay_command") or ""),
    }
