"""Charts of a view as Vega-Lite specifications: points with their interval between processes, or with the outcome of a
cell that has no value. The parts that all charts of a kind share are in charts.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

from lmbench.records.load import first_steps
from lmbench.records.vocabulary import PHASES, SPANS, Values
from lmbench.report import shipped
from lmbench.report.answer import Chart, Spec, listed
from lmbench.report.columns import MEASURED, RELATIVE, Quantity
from lmbench.report.facts import heading
from lmbench.report.frame import Frame, MeasuredCell
from lmbench.report.view import Catalogue, ChartKind, ChartSpec, ColumnOf, Feature

#: Limits beyond which a table says more than a picture: series of a chart, bars of a chart, charts of one spec.
MAX_SERIES, MAX_BARS, MAX_CHARTS = 8, 40, 6
#: Colours of the palette in page.css.
_PALETTE = 19
#: Most steps drawn of a run: a picture of more would be larger than the run's folder.
_MOST_STEPS = 5_000
#: Phases that take a smaller share of each step or bar are not drawn.
_SMALL_FRACTION = 0.01
#: Width of a letter in a legend, of an entry's mark and the space behind it, and of the labels of an axis.
_LETTER_PX, _LEGEND_PX, _AXIS_PX = 7, 48, 60
#: Letters of a row's label that a phone has room for, the height of a line of them, and that of a bar with its gaps.
_LABEL_LETTERS, _LINE_PX, _ROW_PX = 50, 13, 25
_WHISKERS = "Whiskers: 95 % interval between processes, where there are three."
#: Vega's expression for the label of a length: `16k` for 16 x 1024.
_LENGTH_LABEL = "datum.value >= 1024 && datum.value % 1024 == 0 ? datum.value / 1024 + 'k' : format(datum.value, ',')"
#: The scale of an axis of lengths, which usually double from one to the next.
_BINARY = {"type": "log", "base": 2, "nice": False}

#: Points of a chart. Each has `series` (which decides the colour), `x`, `tip` (its tooltip), and `y` in the axis's unit
#: or `outcome` instead. Points with an interval have `low` and `high`.
Points = Sequence[Values]


def build_charts(spec: ChartSpec, frame: Frame, catalogue: Catalogue) -> list[Chart]:
    """One chart for each combination of the facts that the spec does not name, or for each baseline.

    Charts without points are left out. After MAX_CHARTS a last entry says how many more there are.
    """
    kind = catalogue.chart_kinds[spec.kind]
    if kind.by_baseline:
        names = frame.select(cell for cell in frame.cells if cell.base == cell).differing()
    elif kind.has_rows:
        names = []
    else:
        names = frame.differing((spec.x, *spec.series))
    charts, colours = [], dict[str, str]()
    for part in frame.by(names):
        if chart := kind.build(spec, part, catalogue.column):
            _share_colours(chart.spec, colours)
            title = listed(spec.title, part.cells[0].describe(names), separator=": ")
            whiskers = _WHISKERS if any("low" in point for point in chart.spec["data"]["values"]) else ""
            charts.append(Chart(title, chart.spec, f"{chart.caption} {whiskers}".strip()))
    if (more := len(charts) - MAX_CHARTS) > 0:
        last = Chart(f"{spec.title}: {more} more", {}, "They are left out; the tables have all figures.")
        return [*charts[:MAX_CHARTS], last]
    return charts


def _share_colours(spec: Spec, colours: dict[str, str]) -> None:
    """Give each series the colour that it has in the charts before this one, or the palette's next one."""
    scale = spec["layer"][-1]["encoding"]["color"]["scale"]
    for name in scale["domain"]:
        colours.setdefault(name, colour(name, len(colours) + 1))
    scale["range"] = [colours[name] for name in scale["domain"]]


def colour(name: str, index: int) -> str:
    """The colour that page.css has for this name, or else the palette's colour of that index, which starts at 1."""
    fallback = f"--series-{(index - 1) % _PALETTE + 1}"
    return f"var(--of-{re.sub(r'[^0-9A-Za-z]+', '_', name)}, var({fallback}))"


def template(name: str) -> Values:
    """The specification in charts.json that all charts of a kind share."""
    spec: Values = json.loads(shipped("charts.json"))[name]
    return spec


def rows_of(frame: Frame) -> list[tuple[str, MeasuredCell]]:
    """The cells in order, each with a label of the facts that differ."""
    names = frame.differing()
    return [(cell.describe(names) or cell.name, cell) for cell in frame.ordered(names)]


def picture(kind: str, points: Points, behind: Sequence[Spec] = (), **axes: Spec) -> Spec:
    """Points as `lines`, as `bars` side by side or as horizontal bars (`rows`), in the colours of their series.

    Several series have a legend. Whiskers are drawn over the points, and outcomes where there is no value.

    Args:
        behind: layers with data of their own, behind the points.
        axes: by channel, settings of the axes beside those of charts.json.
    """
    spec, series = template(kind), list(dict.fromkeys(point["series"] for point in points))
    scale = {"domain": series, "range": [colour(name, index) for index, name in enumerate(series, start=1)]}
    # As many columns as the page has room for. Labels of the axis shrink `width` after the legend has its height.
    entry_px = _LEGEND_PX + _LETTER_PX * max(map(len, series), default=0)
    room = f"((containerSize()[0] || width) - {_AXIS_PX})"
    legend = {"columns": {"expr": f"clamp(floor({room} / {entry_px}), 1, 3)"}} if len(series) > 1 else None
    shared = {
        "color": {"field": "series", "type": "nominal", "scale": scale, "legend": legend},
        "tooltip": {"field": "tip", "type": "nominal"},
    }
    return {
        **spec,
        "data": {"values": [{"place": series.index(point["series"]), **point} for point in points]},
        "encoding": {channel: axis | axes.get(channel, {}) for channel, axis in spec["encoding"].items()},
        "layer": [*behind, {"encoding": shared, "layer": spec["layer"]}],
    }


def _rows(points: Points, title: str) -> Spec:
    """A horizontal bar for each row. Its label is above it, so that the bar has the whole width of a phone.

    A label that is longer than that has several lines. All labels have as many, the first ones empty.
    """
    lines = {point["x"]: wrap(point["x"], _LABEL_LETTERS) for point in points}
    most = max(map(len, lines.values()))
    labels = {row: "\n".join([" "] * (most - len(texts)) + texts) for row, texts in lines.items()}
    axis = template("rows")["encoding"]["y"]["axis"] | {"labelOffset": -_LINE_PX * most + 4}
    points = [{**point, "x": labels[point["x"]]} for point in points]
    spec = picture("rows", points, x={"title": title}, y={"sort": [*labels.values()], "axis": axis})
    return {**spec, "height": {"step": _ROW_PX + _LINE_PX * most}}


def _is_drawn(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def points_of(column: Quantity, frame: Frame) -> dict[MeasuredCell, Values]:
    """By cell its value in the column's unit with the interval between processes, or its outcome, with a tooltip.

    A cell that ended well but has no finite value has no point.
    """
    values, unit = column.of(frame), column.unit
    points: dict[MeasuredCell, Values] = {}
    for cell in frame.cells:
        figure = values.get(cell)
        if not cell.ok:
            points[cell] = {"outcome": cell.outcome, "tip": f"{cell.name}: {cell.outcome}"}
        elif figure is not None and _is_drawn(figure.value):
            y = figure.value * unit.scale
            points[cell] = {"y": y, "tip": f"{cell.name}: {column.title} {column.text(figure)}"}
            if figure.low is not None:
                points[cell] |= {"low": figure.low * unit.scale, "high": figure.high * unit.scale}
    return points


def _log(title: str) -> Spec:
    """A logarithmic axis, with labels at powers of ten alone where it has several."""
    return {"title": f"{title}, log", "scale": {"type": "log"}, "axis": {"tickCount": 4}}


def _figures(spec: ChartSpec, frame: Frame, column_of: ColumnOf) -> Chart | None:
    """A horizontal bar for each cell; or over `x` a line or bars for each combination of the `series` facts.

    Lines are over a number, or over commits or time.
    """
    quantity, is_line = column_of(spec.y), spec.kind == "lines"
    values, title = points_of(quantity, frame), quantity.column(frame).heading
    cells, differing = frame.ordered([*spec.series, spec.x]), frame.differing()
    # Where all cells share the float32 matmul, tables name the precision alone, and so does the legend.
    series_facts = [name for name in spec.series if name != "matmul" or name in differing]
    positions = [(cell, cell.describe(series_facts), cell.facts.get(spec.x)) for cell in cells]
    if spec.kind == "rows":
        positions = [(cell, "", label) for label, cell in rows_of(frame)]
    is_scale = is_line and spec.x not in frame.course
    points = [
        {"series": series, "x": x if is_scale else str(x), **values[cell]}
        for cell, series, x in positions
        if cell in values and (isinstance(x, int | float) or not is_scale)
    ]
    names = list(dict.fromkeys(point["series"] for point in points))
    is_crowded = len(names) > MAX_SERIES or (len(points) > MAX_BARS and not is_line)
    if is_crowded or not any("y" in point for point in points):
        return None
    if spec.kind == "rows":
        return Chart("", _rows(points, title)) if len(points) > 1 else None
    if is_line and not is_scale:
        # `domain` orders the axis, since Vega-Lite ignores `sort` where layers have data of their own.
        domain = {"domain": [point["x"] for point in points]}
        over = {"type": "nominal", "scale": domain, "title": spec.x, "axis": {"labelAngle": -45}}
        return Chart("", picture("lines", points, x=over, y={"title": title, "scale": {"zero": False}}))
    if is_line:
        # A logarithmic axis has no zero: a whisker that reaches it is as long downwards as upwards.
        for point in points:
            if point.get("low") == 0:
                point["low"] = point["y"] ** 2 / point["high"]
        ticks = {"labelExpr": _LENGTH_LABEL, "values": sorted({point["x"] for point in points})}
        x = {"title": f"{heading(spec.x)}, log", "scale": _BINARY, "axis": ticks}
        return Chart("", picture("lines", points, x=x, y=_log(title)))
    x = {"sort": [str(cell.facts.get(spec.x)) for cell in frame.ordered([spec.x])], "title": heading(spec.x)}
    return Chart("", picture("bars", points, x=x, xOffset={"sort": names}, y={"title": title}))


def _stack(spec: ChartSpec, frame: Frame, column_of: ColumnOf) -> Chart | None:
    """A horizontal bar for each cell, made of the spec's columns `of` one after the other.

    A column that no bar would show is left out, and so has no place in the legend.
    """
    columns, rows = {column: column.of(frame) for column in map(column_of, spec.of)}, rows_of(frame)
    sums = {cell: sum(figures[cell].value for figures in columns.values() if cell in figures) for _, cell in rows}
    unit, points = column_of(spec.of[0]).unit, []
    for column, figures in columns.items():
        if all(figure.value < _SMALL_FRACTION * sums[cell] for cell, figure in figures.items()):
            continue
        for row, cell in rows:
            if cell in figures and _is_drawn(figures[cell].value) and (y := figures[cell].value * unit.scale):
                tip = f"{row}: {column.title} {y:.3g} {unit.word}"
                points.append({"series": column.title, "x": row, "y": y, "tip": tip})
    return Chart("", _rows(points, unit.word)) if points and len(rows) <= MAX_BARS else None


def steps_charts(path: Path) -> list[Chart]:
    """A chart of the steps in a run's folder, from the first step on: the time of the step and of each phase.

    The first steps take much longer than the others, so medians decide which phases are drawn.
    """
    if not (steps := [*first_steps(path, _MOST_STEPS)]):
        return []
    times = {span: [getattr(step, f"{span}_s") or 0.0 for step in steps] for span in (*SPANS[:1], *PHASES)}
    points = [
        {"series": span, "x": step.step, "y": time_s * 1e3, "tip": f"step {step.step}: {span} {time_s * 1e3:.4g} ms"}
        for span, span_times in times.items()
        if median(span_times) >= _SMALL_FRACTION * median(times["step"])
        for step, time_s in zip(steps, span_times, strict=True)
        if time_s
    ]
    x = {"title": "step", "axis": {"tickMinStep": 1}, "scale": {"nice": False}}
    caption = f"The first {len(steps):,} steps, warm-up included."
    return [Chart("Steps", picture("lines", points, x=x, y=_log("ms")), caption)]


#: The report's own columns and kinds of charts.
CORE = Feature(
    columns=(*MEASURED, *RELATIVE),
    chart_kinds={
        "bars": ChartKind(_figures),
        "lines": ChartKind(_figures),
        "rows": ChartKind(_figures, has_rows=True),
        "stack": ChartKind(_stack, has_rows=True),
    },
)
