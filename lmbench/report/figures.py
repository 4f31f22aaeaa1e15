"""Charts as static SVG, to be set into the page.

matplotlib draws them: it is kept by a large team, makes SVG without JavaScript, and sets log axes, whiskers and text
where a bar is missing. What was looked at besides (November 2026): plotly (9.7 MB to install, 4 MB of JavaScript in
every page), altair (needs Vega's JavaScript or a 30 MB renderer), bokeh (6.7 MB, JavaScript), pygal (130 kB, but no
whiskers on lines and no text in place of a value). No date and no random identifier goes into a picture, so the same
results give the same page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from lmbench.report.chart import Chart, Point, Series
from lmbench.report.drawing import MUTED, SERIES, TEXT, Drawing, draw_style, thousands

#: Inches of a lying bar, of a line of its label above it, between both, and between a bar and the next label.
_BAR_HEIGHT, _LINE_HEIGHT, _GAP, _APART = 0.19, 0.185, 0.03, 0.07
#: Characters in one line of a label.
_LABEL_WIDTH = 48


def draw(chart: Chart) -> str:
    """The chart as an `<svg>` element that takes its colours and font from the page."""
    with draw_style():
        return _DRAWERS[chart.kind](chart).svg()


def _draw_bars(chart: Chart) -> Drawing:
    """Bars side by side; on a log axis, where a bar's length means nothing, dots."""
    drawing = Drawing(chart)
    axes, count = drawing.axes, len(chart.series)
    width = 0.8 / count
    for index, series in enumerate(chart.series):
        label: str | None = series.label
        for point in series.points:
            x = chart.categories.index(str(point.x)) + (index - (count - 1) / 2) * width
            if point.y is None:
                _outcome(drawing, x, point)
                continue
            _bar(drawing, x, point.y, point, SERIES[index], width * 0.92, label)
            label = None
    axes.set_xticks(range(len(chart.categories)), chart.categories)
    axes.set_xlim(-0.5, len(chart.categories) - 0.5)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel(chart.x_label)
    drawing.finish_y()
    drawing.legend()
    return drawing


def _bar(drawing: Drawing, x: float, y: float, point: Point, colour: str, width: float, label: str | None) -> None:
    if drawing.chart.is_log:
        (dot,) = drawing.axes.plot([x], [y], "o", color=colour, markersize=6, label=label)
        dot.set_gid(drawing.tip(point.tip))
        _whiskers(drawing.axes, x, point, colour)
    else:
        (bar,) = drawing.axes.bar([x], [y], width, color=colour, label=label)
        bar.set_gid(drawing.tip(point.tip))
        _whiskers(drawing.axes, x, point, TEXT)


def _whiskers(axes: Axes, x: float, point: Point, colour: str) -> None:
    if point.y is None or point.low is None or point.high is None:
        return
    ends = [[max(0.0, point.y - point.low)], [max(0.0, point.high - point.y)]]
    axes.errorbar([x], [point.y], yerr=ends, fmt="none", ecolor=colour, elinewidth=1.2, capsize=2.5)


def _outcome(drawing: Drawing, x: float, point: Point) -> None:
    """The outcome where the bar would stand."""
    if not point.outcome:
        return
    axes = drawing.axes
    text = axes.text(
        x, 0.03, point.outcome, transform=axes.get_xaxis_transform(), rotation=90, ha="center", va="bottom",
        fontsize=9.5, color=MUTED,
    )  # fmt: skip
    text.set_gid(drawing.tip(point.tip))


def _draw_lines(chart: Chart) -> Drawing:
    drawing = Drawing(chart)
    axes = drawing.axes
    missing: dict[float, int] = {}
    for series, colour in zip(chart.series, SERIES, strict=False):
        _line(drawing, series.points, colour, series.label)
        for point in series.points:
            if point.y is None and point.outcome:
                level = 0.96 - 0.085 * missing.get(float(point.x), 0)
                missing[float(point.x)] = missing.get(float(point.x), 0) + 1
                _cross(drawing, point, level, colour)
    places = sorted({float(point.x) for series in chart.series for point in series.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(LogLocator(base=2, subs=()))
    axes.set_xlabel(chart.x_label)
    drawing.finish_y()
    drawing.legend()
    return drawing


def _line(drawing: Drawing, points: Sequence[Point], colour: str, label: str) -> None:
    """A line through the known points, each with its dot and whiskers."""
    known = [(float(point.x), point.y) for point in points if point.y is not None]
    drawing.axes.plot([x for x, _ in known], [y for _, y in known], "-", color=colour, label=label, lw=1.6)
    for point in points:
        if point.y is not None:
            (dot,) = drawing.axes.plot([float(point.x)], [point.y], "o", color=colour, markersize=5)
            dot.set_gid(drawing.tip(point.tip))
            _whiskers(drawing.axes, float(point.x), point, colour)


def _cross(drawing: Drawing, point: Point, level: float, colour: str) -> None:
    """A cross near the top with a word, for a run that gave no value; `level` is a share of the axes' height."""
    axes, place = drawing.axes, float(point.x)
    transform = axes.get_xaxis_transform()
    (cross,) = axes.plot([place], [level], "x", color=colour, markersize=6, mew=1.8, transform=transform, clip_on=False)
    cross.set_gid(drawing.tip(point.tip))
    axes.annotate(
        point.outcome.partition(" ")[0], (place, level), xycoords=transform, xytext=(-6, 0),
        textcoords="offset points", ha="right", va="center", fontsize=9.5, color=MUTED,
    )  # fmt: skip


def _draw_steps(chart: Chart) -> Drawing:
    drawing = Drawing(chart)
    for series, colour in zip(chart.series, SERIES, strict=False):
        _line(drawing, series.points, colour, series.label)
    drawing.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    drawing.axes.set_xlabel(chart.x_label)
    drawing.finish_y()
    drawing.legend()
    return drawing


def _draw_rows(chart: Chart) -> Drawing:
    """A lying bar for each point with its label above it, which leaves a phone's width to the bar."""
    points = chart.series[0].points
    drawing, places = _row_drawing(chart, [str(point.x) for point in points])
    axes = drawing.axes
    for place, point in zip(places, points, strict=True):
        if point.y is None:
            text = axes.text(0, place, f" {point.outcome}", va="center", fontsize=9.5, color=MUTED)
            text.set_gid(drawing.tip(point.tip))
            continue
        (bar,) = axes.barh([place], [point.y], _BAR_HEIGHT, color=SERIES[0])
        bar.set_gid(drawing.tip(point.tip))
        if point.low is not None and point.high is not None:
            ends = [[max(0.0, point.y - point.low)], [max(0.0, point.high - point.y)]]
            axes.errorbar([point.y], [place], xerr=ends, fmt="none", ecolor=TEXT, elinewidth=1.1, capsize=2.5)
    axes.set_xlim(0, chart.highest * 1.04 or 1)
    return drawing


def _draw_phases(chart: Chart) -> Drawing:
    drawing, places = _row_drawing(chart, chart.categories)
    lefts = [0.0] * len(places)
    for index, series in enumerate(chart.series):
        colour = _colour(series, index)
        for row, point in enumerate(series.points):
            label = series.label if row == 0 else None
            place, length = [places[row]], point.y or 0.0
            (bar,) = drawing.axes.barh(place, [length], _BAR_HEIGHT, lefts[row], color=colour, label=label)
            bar.set_gid(drawing.tip(point.tip))
            lefts[row] += length
    drawing.axes.set_xlim(0, 1.04 * max(lefts, default=0.0) or 1)
    drawing.legend()
    return drawing


def _colour(series: Series, index: int) -> str:
    if series.colour is None:
        return SERIES[index % len(SERIES)]
    return SERIES[series.colour - 1] if series.colour else MUTED


def _row_drawing(chart: Chart, labels: Sequence[str]) -> tuple[Drawing, list[float]]:
    """A drawing of labelled rows, and the middle of each row's bar; a long label takes several lines.

    The vertical axis is in inches from the top, so that no label lies on the bar above it however many lines it has.
    """
    places, height = [], 0.0
    texts = [wrap(label, _LABEL_WIDTH) for label in labels]
    for lines in texts:
        height += _APART + _LINE_HEIGHT * len(lines) + _GAP
        places.append(height + _BAR_HEIGHT / 2)
        height += _BAR_HEIGHT
    height += _APART
    drawing = Drawing(chart, height)
    axes = drawing.axes
    transform = axes.get_yaxis_transform()
    for place, lines in zip(places, texts, strict=True):
        bottom = place - _BAR_HEIGHT / 2 - _GAP
        axes.text(0.004, bottom, "\n".join(lines), transform=transform, va="bottom", linespacing=1.05)
    axes.set_ylim(height, 0)
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(chart.y_label)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(thousands())
    return drawing, places


_DRAWERS: dict[str, Callable[[Chart], Drawing]] = {
    "bars": _draw_bars,
    "lines": _draw_lines,
    "rows": _draw_rows,
    "phases": _draw_phases,
    "steps": _draw_steps,
}
