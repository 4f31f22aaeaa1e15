"""Charts of a view as Vega-Lite specifications: points with the interval between processes, or with the reason why one
is missing. What all charts of a kind share stands in charts.json."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmbench.records.statistics import sample_std
from lmbench.records.vocabulary import PHASES, SPANS
from lmbench.report import shipped
from lmbench.report.answer import Chart, Spec
from lmbench.report.columns import MEASURED, RELATIVE, Column, first_steps
from lmbench.report.facts import heading
from lmbench.report.frame import Frame
from lmbench.report.view import ChartKind, ChartSpec, ColumnOf, Feature

#: Beyond these a picture tells less than the table: lines or bars side by side, bars in all, charts of one kind.
MAX_SERIES, MAX_BARS, MAX_CHARTS = 8, 40, 6
#: Steps shown of a run: beyond, a picture is larger than the folder.
_MOST_STEPS = 5_000
#: Phases that take less of the steps are not drawn.
_SMALL_FRACTION = 0.01
_WHISKERS = "Whiskers: ± standard deviation between processes, of a ratio its 95 % interval; none of one process."
#: Lengths of thousands as `16k`, which is 16 x 1024.
_IN_SHORT = "datum.value >= 1024 && datum.value % 1024 == 0 ? datum.value / 1024 + 'k' : format(datum.value, ',')"
#: An axis of lengths: each twice as long as the one before.
_BINARY = {"type": "log", "base": 2, "nice": False}

#: Points have `series` (which decides the colour), `x`, `y` in the axis's unit, `tip`, and where known `low`, `high`,
#: and `outcome` (instead of `y`).
Points = Sequence[dict[str, Any]]


def build_charts(spec: ChartSpec, kind: ChartKind, frame: Frame, column_of: ColumnOf) -> list[Chart]:
    """One chart for each combination of facts that the spec does not name, or for each baseline, that has anything to
    show; of more than MAX_CHARTS the last says how many were left out."""
    others = [] if kind.has_rows else [name for name in frame.differing() if name not in (spec.x, *spec.series)]
    if kind.by_baseline:
        others = frame.select(cell for cell in frame.known if frame.base.get(cell) == cell).differing()
    charts = []
    for part in frame.by(others):
        if chart := kind.build(spec, part, column_of):
            title = ": ".join(filter(None, [spec.title, part.in_words(next(iter(part.known)), others)]))
            whiskers = _WHISKERS if any("low" in point for point in chart.spec["data"]["values"]) else ""
            charts.append(Chart(title, chart.spec, f"{chart.caption} {whiskers}".strip()))
    more = len(charts) - MAX_CHARTS
    rest = Chart(f"{spec.title}: {more} more", {}, "They are left out; the tables have all figures.")
    return [*charts[:MAX_CHARTS], *([rest] if more > 0 else [])]


def colour(name: str, place: int = 0) -> str:
    """The colour of page.css for what is called that, else that of the place in the palette; 0 is the muted one."""
    other = f"--series-{place}" if place else "--muted"
    return f"var(--of-{re.sub(r'[^0-9A-Za-z]+', '_', name)}, var({other}))"


def template(name: str) -> dict[str, Any]:
    """What charts of a kind share, of charts.json."""
    spec: dict[str, Any] = json.loads(shipped("charts.json"))[name]
    return spec


def rows_of(frame: Frame) -> list[tuple[str, int]]:
    """The cells in order, each with a label that says what differs."""
    names = frame.differing()
    return [(frame.in_words(cell, names) or frame.name(cell), cell) for cell in frame.ordered(names)]


def picture(kind: str, points: Points, behind: Sequence[Spec] = (), **axes: Spec) -> Spec:
    """Points as `lines`, `bars` side by side or lying `rows`, in the colours of their series, with a legend where there
    are several; over them whiskers, and outcomes where there is no value.

    Args:
        behind: layers with data of their own, behind the points.
        axes: by channel, what the axes have beside what charts.json says.
    """
    spec, series = template(kind), list(dict.fromkeys(point["series"] for point in points))
    scale = {"domain": series, "range": [colour(name, place) for place, name in enumerate(series, start=1)]}
    legend = {} if len(series) > 1 else {"legend": None}
    shared = {
        "color": {"field": "series", "type": "nominal", "scale": scale, **legend},
        "tooltip": {"field": "tip", "type": "nominal"},
    }
    return {
        **spec,
        "data": {"values": [{"place": series.index(point["series"]), **point} for point in points]},
        "encoding": {channel: axis | axes.get(channel, {}) for channel, axis in spec["encoding"].items()},
        "layer": [*behind, {"encoding": shared, "layer": spec["layer"]}],
    }


def _rows(points: Points, title: str) -> Spec:
    """A lying bar for each row, labelled above it, which leaves a phone's width to the bar."""
    return picture("rows", points, x={"title": title}, y={"sort": list(dict.fromkeys(point["x"] for point in points))})


def points_of(column: Column, frame: Frame) -> dict[int, dict[str, Any]]:
    """A cell's value in the column's unit with its interval between processes, or the outcome, and what is told of it
    under a pointer; a cell without either has no point."""
    values, unit = column.of(frame), column.unit
    points: dict[int, dict[str, Any]] = {}
    for cell in frame.known:
        entry, label, name = values.get(cell), frame.label(cell), frame.name(cell)
        if cell not in frame.ok:
            points[cell] = {"outcome": label, "tip": f"{name}: {label}"}
        elif entry is not None and isinstance(entry.value, int | float):
            value = entry.value * unit.scale
            points[cell] = {"y": value, "tip": f"{name}: {column.title} {column.text(entry)} {unit.word}".rstrip()}
            numbers = frame.numbers(cell, column.expression) if column.is_of_one_process else ()
            if (std := sample_std(numbers)) is not None:
                spread = std * unit.scale
                # As wide in logarithms, where it would reach below zero.
                low = value - spread if spread < value else value**2 / (value + spread)
                points[cell] |= {"low": low, "high": value + spread}
            elif entry.high:
                points[cell] |= {"low": entry.low * unit.scale, "high": entry.high * unit.scale}
    return points


def _log(title: str) -> Spec:
    return {"title": f"{title}, log", "scale": {"type": "log"}}


def _figures(spec: ChartSpec, frame: Frame, column_of: ColumnOf) -> Chart | None:
    """A lying bar for each cell; or a line or bars over `x` for each combination of the facts that make the series."""
    column, is_line = column_of(spec.y), spec.kind == "lines"
    values, title = points_of(column, frame), column.heading(frame).heading
    order = frame.ordered([*spec.series, spec.x])
    places: list[Any] = [(cell, frame.in_words(cell, spec.series), frame.known[cell].get(spec.x)) for cell in order]
    if spec.kind == "rows":
        places = [(cell, "", label) for label, cell in rows_of(frame)]
    points = [
        {"series": name, "x": x if is_line else str(x), **values[cell]}
        for cell, name, x in places
        if cell in values and (isinstance(x, int | float) or not is_line)
    ]
    series = list(dict.fromkeys(point["series"] for point in points))
    is_too_much = len(series) > MAX_SERIES or (len(points) > MAX_BARS and not is_line)
    if is_too_much or not any("y" in point for point in points):
        return None
    if spec.kind == "rows":
        return Chart("", _rows(points, title))
    if is_line:
        ticks = {"labelExpr": _IN_SHORT, "values": sorted({point["x"] for point in points})}
        x = {"title": f"{heading(spec.x)}, log", "scale": _BINARY, "axis": ticks}
        return Chart("", picture("lines", points, x=x, y=_log(title)))
    x = {"sort": [str(frame.known[cell].get(spec.x)) for cell in frame.ordered([spec.x])], "title": heading(spec.x)}
    return Chart("", picture("bars", points, x=x, xOffset={"sort": series}, y={"title": title}))


def _stack(spec: ChartSpec, frame: Frame, column_of: ColumnOf) -> Chart | None:
    """Columns on top of each other, a lying bar for each cell that has them."""
    columns, rows = list(map(column_of, spec.of)), rows_of(frame)
    unit = columns[0].unit
    points = [
        {"series": column.title, "x": row, "y": y, "tip": f"{row}: {column.title} {y:.3g} {unit.word}"}
        for column, figures in [(column, column.of(frame)) for column in columns]
        for row, cell in rows
        if cell in figures and (y := figures[cell].value * unit.scale)
    ]
    return Chart("", _rows(points, unit.word)) if points and len(rows) <= MAX_BARS else None


def steps_charts(path: Path) -> list[Chart]:
    """The steps of a run's folder: their time and that of each phase, from the first on, as a chart."""
    steps = [*first_steps(path, _MOST_STEPS)]
    times = {span: [getattr(step, f"{span}_s") or 0.0 for step in steps] for span in (*SPANS[:1], *PHASES)}
    points = [
        {"series": span, "x": step.step, "y": time_s * 1e3, "tip": f"step {step.step}: {span} {time_s * 1e3:.4g} ms"}
        for span in [span for span in times if sum(times[span]) >= _SMALL_FRACTION * sum(times["step"])]
        for step, time_s in zip(steps, times[span], strict=True)
        if time_s
    ]
    x, caption = {"title": "step", "axis": {"tickMinStep": 1}}, f"The first {len(steps):,} steps."
    return [Chart("Steps", picture("lines", points, x=x, y=_log("ms")), caption)] if points else []


_KINDS = {
    "bars": ChartKind(_figures),
    "lines": ChartKind(_figures),
    "rows": ChartKind(_figures, has_rows=True),
    "stack": ChartKind(_stack, has_rows=True),
}

#: What the report itself has.
OWN = Feature((*MEASURED, *RELATIVE), _KINDS)
