"""A picture in the making: its style, its axes, the tips of its marks, and the clean SVG at the end."""

from __future__ import annotations

import io
import math
import re
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from lmbench.report.chart import Chart
from lmbench.report.colours import COUNT

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
SERIES = [f"#a1{index:04d}" for index in range(1, COUNT + 1)]
_VARIABLES = {
    TEXT: "var(--text)", MUTED: "var(--muted)", _GRID: "var(--grid)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(SERIES, start=1)},
}  # fmt: skip
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "lmbench", "font.size": 10.5, "font.family": "DejaVu Sans",
    "text.color": TEXT, "axes.edgecolor": MUTED, "axes.labelcolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True,
    "grid.color": _GRID, "grid.linewidth": 0.8, "legend.frameon": False, "legend.fontsize": 9.5,
    "axes.linewidth": 0.8, "legend.handlelength": 1.2, "legend.columnspacing": 1.2, "axes.unicode_minus": False,
    # A dollar sign in somebody's option is no formula.
    "text.parse_math": False,
}  # fmt: skip


class Drawing:
    """One picture: `axes` to draw on; `svg` when all is drawn.

    Made and used within `matplotlib.rc_context(STYLE)`.

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

    def _legend_shape(self) -> tuple[int, int]:
        """Columns and rows; no rows where there is nothing to tell apart."""
        labels = [series.label for series in self.chart.series]
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
            axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=12))
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(0, highest * (1 + room) or 1)
        axes.yaxis.set_major_formatter(thousands())

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


def thousands() -> FuncFormatter:
    """Numbers of an axis with their thousands apart."""
    return FuncFormatter(lambda value, _: f"{value:,g}")


def draw_style() -> Any:
    """The context in which a picture is made."""
    return mpl.rc_context(STYLE)


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
