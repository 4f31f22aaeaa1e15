"""Charts of Vega-Lite: as a part of a page that loads nothing, and as a file."""

from __future__ import annotations

from browser import needs_browser, operate

from lmbench.report.answer import Answer, Chart
from lmbench.report.page import chart_html, svg
from lmbench.report.render import render


def _spans(count):
    rows = [
        {"start": place, "end": place + 0.5, "row": place % 3, "text": f"<b> </script> \u202e {place % 7}"}
        for place in range(count)
    ]
    return {
        "data": {"values": rows},
        "mark": {"type": "rect", "tooltip": True},
        "encoding": {
            "x": {"field": "start", "type": "quantitative"},
            "x2": {"field": "end"},
            "y": {"field": "row", "type": "ordinal"},
            "color": {"field": "text", "type": "nominal"},
        },
    }


@needs_browser
def test_a_page_draws_its_charts_and_loads_nothing(tmp_path):
    page = tmp_path / "page.html"
    charts = [Chart(f"{count} spans", _spans(count)) for count in (30, 20_000)]
    page.write_text(render(Answer(charts=lambda: charts), "html"))
    assert page.stat().st_size < 3_400_000
    drawn = """
        while (page.querySelectorAll(".vega[data-rows]").length < 2) await wait();
        const root = page.documentElement, requests = view.performance.getEntriesByType("resource").length;
        return [requests, root.scrollWidth - root.clientWidth, ...[...page.querySelectorAll(".vega")].map(
            box => [box.dataset.rows, box.querySelector("svg.marks, canvas.marks").tagName.toLowerCase()])];
    """
    assert operate(page, 500, drawn) == [0, 0, ["30", "svg"], ["20000", "canvas"]]


def test_a_picture_of_a_file_has_its_colours_and_no_script():
    picture = svg(_spans(5))
    assert picture.startswith("<svg")
    assert "--series-1: #2f6fde" in picture
    assert "<script" not in picture
    assert "\u202e" not in chart_html(_spans(5))
