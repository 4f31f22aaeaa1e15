"""Charts as static SVG, to be set into the page.

matplotlib draws them: it is kept by a large team, makes SVG without JavaScript, and sets log axes, whiskers and text
where a bar is missing. What was looked at besides (November 2026): plotly (9.7 MB to install, 4 MB of JavaScript in
every page), altair (needs Vega's JavaScript or a 30 MB renderer), bokeh (6.7 MB, JavaScript), pygal (130 kB, but no
whiskers on lines and no text in place of a value). No date and no random identifier goes into a picture, so the same
results give the same page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from textwrap import wrap
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from lmbench.report.charts import Chart, Point, Series
from lmbench.report.page import palette
from lmbench.report.palette import COLOURS

#: Inches at 72 points each: narrow, so that the text keeps its size on a phone.
WIDTH, HEIGHT = 4.5, 3.1
#: Characters of a row of the legend; each label has a mark and a gap besides.
_LEGEND_WIDTH = 52
#: Inches of such a row, and of what is left, right, below and above axes whose height is given: the axis has its
#: numbers and its name below.
_LEGEND_HEIGHT = 0.205
_LEFT, _RIGHT, _BELOW, _ABOVE = 0.1, 0.16, 0.52, 0.08

#: Place-holders for the page's CSS variables, which follow its light or dark scheme.
TEXT, MUTED, _GRID = "#a20001", "#a20002", "#a20003"
SERIES = [f"#a1{index:04d}" for index in range(1, COLOURS + 1)]
_VARIABLES = {
    TEXT: "var(--text)", MUTED: "var(--muted)", _GRID: "var(--grid)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(SERIES, start=1)},
}  # fmt: skip
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "lmbench", "font.size": 10.5, "font.family": "DejaVu Sans",
    "text.color": TEXT, "axes.edgecolor": MUTED, "axes.labelcolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True,
    "grid.color": _GRID, "grid.linewidth": 0.8, "legend.frameon": False, "legend.fontsize": 9.5,
    "axes.linewidth": 0.8, "legend.handlelength": 1.2, "legend.columnspacing": 1.2, "axes.unicode_minus": False,
    # A dollar sign in somebody's option is no formula.
    "text.parse_math": False,
}  # fmt: skip
#: Inches of a lying bar, of a line of its label above it, between both, and between a bar and the next label.
_BAR_HEIGHT, _LINE_HEIGHT, _GAP, _APART = 0.19, 0.185, 0.03, 0.07
#: Characters in one line of a label.
_LABEL_WIDTH = 48
#: Places beyond which an axis is told by round numbers; ticks that a log axis has at least and at most, and what they
#: are multiples of, coarsest first.
_MAX_PLACES = 12
_TICKS = 3, 7
_MULTIPLES = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0))
#: How strong the bar of what is compiled is beside the eager one.
_PALE = 0.55


def draw(chart: Chart) -> str:
    """The chart as an `<svg>` element that takes its colours and font from the page."""
    with mpl.rc_context(_STYLE):
        return _DRAWERS[chart.kind](chart).svg()


def draw_alone(chart: Chart) -> str:
    """The chart as a file of its own, light or dark as its viewer is."""
    head, bracket, rest = draw(chart).partition(">")
    style = f"<style>{palette()}text {{ font-family: system-ui, sans-serif !important; }}</style>"
    return f'{head}{bracket}{style}<rect width="100%" height="100%" style="fill: var(--surface)"/>{rest}'


class Drawing:
    """One picture: `axes` to draw on; `svg` when all is drawn.

    Made and used within `matplotlib.rc_context(_STYLE)`.

    Args:
        height: inches of the axes, where that is given; else they have what the picture leaves them.
    """

    def __init__(self, chart: Chart, height: float | None = None) -> None:
        self.chart = chart
        if height is None:
            self.figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
            self.axes: Axes = self.figure.add_subplot()
        else:
            whole = _BELOW + height + _ABOVE + _LEGEND_HEIGHT * self._legend_shape()[1]
            self.figure = Figure(figsize=(WIDTH, whole))
            self.axes = self.figure.add_axes(
                (_LEFT / WIDTH, _BELOW / whole, 1 - (_LEFT + _RIGHT) / WIDTH, height / whole)
            )
        self.figure.patch.set_alpha(0)
        self.axes.patch.set_alpha(0)
        self._tips: list[str] = []

    def tip(self, text: str) -> str:
        """The identifier of a mark that shows this text under the pointer."""
        self._tips.append(text)
        return f"tip-{len(self._tips) - 1}"

    def legend(self) -> None:
        """Labels of the series above the axes, row by row, as many in a row as fit."""
        columns, rows = self._legend_shape()
        if not rows:
            return
        handles, labels = self.axes.get_legend_handles_labels()
        # matplotlib fills columns first.
        order = [row * columns + column for column in range(columns) for row in range(rows)]
        taken = [place for place in order if place < len(labels)]
        self.axes.legend(
            [handles[place] for place in taken], [labels[place] for place in taken], loc="lower left",
            bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderaxespad=0.2,
        )  # fmt: skip

    @property
    def legend_rows(self) -> int:
        return self._legend_shape()[1]

    def _legend_shape(self) -> tuple[int, int]:
        """Columns and rows; no rows where there is nothing to tell apart."""
        labels = [series.label for series in self.chart.series] + [self.chart.band_label] * bool(self.chart.band)
        labels += [self.chart.guide.name] if self.chart.guide is not None else []
        if len(labels) < 2:
            return 0, 0
        columns = max(1, min(4, _LEGEND_WIDTH // (max(map(len, labels)) + 5)))
        return columns, math.ceil(len(labels) / columns)

    def finish_y(self) -> None:
        """Scale and label of the value's axis, and the level that limits it."""
        axes, chart = self.axes, self.chart
        axes.set_ylabel(chart.y_label)
        # Crosses of missing points stand above the lines.
        room = 0.05 + 0.14 * chart.most_missing if chart.kind == "lines" else 0.05
        highest = chart.highest
        if chart.limit is not None and chart.highest > 0.4 * chart.limit[0]:
            self._draw_limit(*chart.limit)
            highest = max(highest, chart.limit[0])
        if chart.is_log and chart.lowest > 0:
            low = chart.lowest / 1.15
            axes.set_yscale("log")
            axes.set_ylim(low, highest * (highest / low) ** room * 1.1)
            axes.yaxis.set_major_locator(FixedLocator(log_ticks(low, highest * 1.1)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_ylabel(f"{chart.y_label}, log")
        else:
            axes.set_ylim(0, highest * (1 + room) or 1)
        axes.yaxis.set_major_formatter(_thousands())

    def _draw_limit(self, level: float, name: str) -> None:
        self.axes.axhline(level, color=MUTED, linestyle="--", linewidth=1)
        self.axes.annotate(
            name, (0.0, level), xycoords=self.axes.get_yaxis_transform(), xytext=(4, -4), textcoords="offset points",
            fontsize=9.5, color=MUTED, va="top",
        )  # fmt: skip

    def svg(self) -> str:
        """The picture as an `<svg>` element that takes its colours and font from the page."""
        buffer = io.StringIO()
        self.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return _clean(buffer.getvalue(), self._tips, self.chart.title)


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, at least three and at most seven, for an axis of logarithms."""
    least, most = _TICKS
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for multiples in _MULTIPLES:
        found = [tick for power in decades for each in multiples if low <= (tick := each * 10.0**power) <= high]
        if len(found) >= least:
            return found[:: math.ceil(len(found) / most)]
    return [float(tick) for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]


def _thousands() -> FuncFormatter:
    """Numbers of an axis with their thousands apart."""
    return FuncFormatter(lambda value, _: f"{value:,g}")


def _clean(svg: str, tips: list[str], title: str) -> str:
    """Only the element: no header, no metadata, no size, and no identifiers that another chart would repeat."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for index, tip in enumerate(tips):
        svg = svg.replace(f'<g id="tip-{index}">', f'<g class="mark"><title>{escape(tip)}</title>')
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    head, bracket, rest = svg.partition(">")
    head = re.sub(r' (?:width|height)="[^"]*"', "", head)
    return head.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1) + bracket + rest


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
            _bar(drawing, x, point.y, point, series, _colour(series, index), width * 0.92, label)
            label = None
    axes.set_xticks(range(len(chart.categories)), chart.categories)
    axes.set_xlim(-0.5, len(chart.categories) - 0.5)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel(chart.x_label)
    drawing.finish_y()
    drawing.legend()
    return drawing


def _bar(
    drawing: Drawing, x: float, y: float, point: Point, series: Series, colour: str, width: float, label: str | None
) -> None:
    if drawing.chart.is_log:
        fill = "none" if series.is_dashed else colour
        (dot,) = drawing.axes.plot([x], [y], "o", color=colour, mfc=fill, mew=1.6, markersize=6, label=label)
        dot.set_gid(drawing.tip(point.tip))
        _whiskers(drawing.axes, x, point, colour)
    else:
        pale = _PALE if series.is_dashed else 1.0
        (bar,) = drawing.axes.bar([x], [y], width, color=colour, label=label, alpha=pale)
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
    places = sorted({float(point.x) for series in chart.series for point in series.points})
    missing: dict[float, int] = {}
    for index, series in enumerate(chart.series):
        colour = _colour(series, index)
        _line(drawing, series, colour)
        for point in series.points:
            if point.y is None and point.outcome:
                level = 0.96 - 0.085 * missing.get(float(point.x), 0)
                missing[float(point.x)] = missing.get(float(point.x), 0) + 1
                _cross(drawing, point, level, colour, float(point.x) == places[0])
    if chart.guide is not None:
        axes.plot(*zip(*chart.guide.ends, strict=True), "--", color=MUTED, label=chart.guide.name, lw=1.2, zorder=1)
    if len(places) > _MAX_PLACES:
        axes.set_xscale("log", base=10)
        axes.xaxis.set_major_locator(FixedLocator(log_ticks(places[0], places[-1])))
        axes.xaxis.set_major_formatter(_thousands())
    else:
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [_in_short(place) for place in places])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"{chart.x_label}, log")
    drawing.finish_y()
    drawing.legend()
    return drawing


def _in_short(place: float) -> str:
    """A number at an axis: lengths of thousands as `16k`, which is 16 x 1024."""
    return f"{place / 1024:g}k" if place >= 1024 and place % 1024 == 0 else f"{place:g}"


def _line(drawing: Drawing, series: Series, colour: str) -> None:
    """A line through the known points, each with its dot and whiskers."""
    known = [(float(point.x), point.y) for point in series.points if point.y is not None]
    style = "--" if series.is_dashed else "-"
    drawing.axes.plot([x for x, _ in known], [y for _, y in known], style, color=colour, label=series.label, lw=1.6)
    for point in series.points:
        if point.y is not None:
            (dot,) = drawing.axes.plot([float(point.x)], [point.y], "o", color=colour, markersize=5)
            dot.set_gid(drawing.tip(point.tip))
            _whiskers(drawing.axes, float(point.x), point, colour)


def _cross(drawing: Drawing, point: Point, level: float, colour: str, is_first: bool) -> None:
    """A cross near the top with a word, for a run that gave no value; `level` is a share of the axes' height. The word
    is on the left, but for the first place, where the axis has its numbers."""
    axes, place = drawing.axes, float(point.x)
    transform = axes.get_xaxis_transform()
    (cross,) = axes.plot([place], [level], "x", color=colour, markersize=6, mew=1.8, transform=transform, clip_on=False)
    cross.set_gid(drawing.tip(point.tip))
    # `OOM (forward)` is OOM, `error: incorrect` is incorrect.
    word = point.outcome.partition(" (")[0].rpartition(": ")[2]
    axes.annotate(
        word, (place, level), xycoords=transform, xytext=(6 if is_first else -6, 0),
        textcoords="offset points", ha="left" if is_first else "right", va="center", fontsize=9.5, color=MUTED,
    )  # fmt: skip


def _draw_steps(chart: Chart) -> Drawing:
    drawing = Drawing(chart)
    for index, series in enumerate(chart.series):
        _line(drawing, series, _colour(series, index))
    drawing.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    drawing.axes.set_xlabel(chart.x_label)
    drawing.finish_y()
    drawing.legend()
    return drawing


def _draw_curves(chart: Chart) -> Drawing:
    """A line for each series, over the band; a cross where one broke off."""
    drawing = Drawing(chart)
    drawing.figure.set_figheight(HEIGHT + _LEGEND_HEIGHT * drawing.legend_rows)
    axes = drawing.axes
    if chart.band:
        places, lows, highs = zip(*chart.band, strict=True)
        axes.fill_between(places, lows, highs, color=MUTED, alpha=0.3, linewidth=0, label=chart.band_label)
    crosses = 0
    for index, series in enumerate(chart.series):
        colour = _colour(series, index)
        known = [(float(point.x), point.y) for point in series.points if point.y is not None]
        style = "--" if series.is_dashed else "-"
        (line,) = axes.plot(
            [x for x, _ in known], [y for _, y in known], style, color=colour, label=series.label, lw=1.3
        )
        line.set_gid(drawing.tip(series.points[-1].tip))
        for point in series.points:
            if point.y is None:
                _cross(drawing, point, 0.96 - 0.085 * crosses, colour, is_first=False)
                crosses += 1
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.span is not None:
        axes.set_ylim(*chart.span)
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
    axes.xaxis.set_major_formatter(_thousands())
    return drawing, places


_DRAWERS: dict[str, Callable[[Chart], Drawing]] = {
    "bars": _draw_bars,
    "lines": _draw_lines,
    "rows": _draw_rows,
    "phases": _draw_phases,
    "steps": _draw_steps,
    "curves": _draw_curves,
}
