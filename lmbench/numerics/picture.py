"""The chart of error against the number of addends, and the page that has it."""

from __future__ import annotations

from html import escape

from lmbench.numerics.record import Curve, CurvePoint, Numerics, Sum
from lmbench.numerics.tables import answers, closing, detail_table, error_text, published_table, sum_table, total_text
from lmbench.report.charts import Chart, Point, Series
from lmbench.report.figures import draw, draw_alone
from lmbench.report.page import table_html, whole_page
from lmbench.report.table import Line
from lmbench.text import shown_lines

_TITLE = "Sums and norms in 16 bit"
_CAPTION = (
    "Of the summation alone: relative to n times the addend as its format holds it. A line has no dot where the sum is "
    "exact, and a cross where it is infinite."
)


def error_chart(found: Numerics) -> Chart:
    """Relative error of the loop and of torch.sum against n, both axes logarithmic."""
    series = [
        Series(label, [_point(point, ways[way], label) for point, ways in _ways(curve)])
        for way in (0, 1)
        for curve in found.curves
        for label in (f"{('loop', 'torch.sum')[way]} {_name(curve)}",)
    ]
    return Chart(
        kind="lines",
        x_label="n",
        y_label="size of the relative error",
        series=series,
        title=f"Adding {found.addend:g} n times",
        caption=_CAPTION,
        is_log=True,
    )


def _ways(curve: Curve) -> list[tuple[CurvePoint, tuple[Sum, Sum]]]:
    return [(point, (point.loop, point.reduction)) for point in curve.points]


def _name(curve: Curve) -> str:
    if curve.accumulator == curve.addend_dtype:
        return curve.accumulator
    return f"{curve.accumulator} += {curve.addend_dtype}"


def _point(at: CurvePoint, of: Sum, label: str) -> Point:
    error = of.summing_error_fraction
    tip = f"{label}, n = {at.n:,}: {total_text(of.total)}, {error_text(error)}"
    if error is None:
        return Point(at.n, None, outcome="inf", tip=tip)
    return Point(at.n, abs(error) or None, tip=tip)


def own_page(found: Numerics) -> str:
    """A page with the chart and every table, which needs nothing else."""
    chart = error_chart(found)
    tables = (sum_table(found), published_table(found), detail_table(found))
    body = f"""<header><p class="brand">lmbench</p></header>
<main>
<section>
<h1>{_TITLE}</h1>
<p class="question">How wrong is a sum, and from which input on do norms, softmax and cross entropy fail?</p>
{_facts(answers(found))}
<div class="charts">
<figure class="chart">
<figcaption class="chart-title">{escape(chart.title)}</figcaption>
{draw(chart)}
<p class="chart-note">{escape(chart.caption)}</p>
</figure>
</div>
{"".join(map(table_html, tables))}
{_facts(closing(found))}
</section>
</main>
"""
    return shown_lines(whole_page("numerics", _TITLE, body))


def own_svg(found: Numerics) -> str:
    """The chart as a file of its own."""
    return draw_alone(error_chart(found))


def _facts(lines: list[Line]) -> str:
    items = (f"<li>{escape(f'{label}: {text}' if label else text)}</li>" for label, text in lines)
    return f'<ul class="facts">{"".join(items)}</ul>'
