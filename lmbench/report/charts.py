"""Charts of a view as Vega-Lite specifications: points with the interval between processes, or with the reason why one
is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lmbench.records.vocabulary import PHASES, SPANS
from lmbench.report.answer import Chart
from lmbench.report.columns import Column, first_steps
from lmbench.report.facts import heading
from lmbench.report.frame import Frame
from lmbench.report.vega import colour
from lmbench.report.view import ChartSpec

#: Beyond these a picture tells less than the table: lines or bars side by side, bars in all, charts of one kind.
MAX_SERIES, MAX_BARS, MAX_CHARTS = 8, 40, 6
#: Steps shown of a run's beginning.
_FIRST_STEPS = 16
#: Steps shown of a run: beyond, a picture is larger than the folder.
_MOST_STEPS = 5_000
#: What is below this share of every bar is drawn with the rest.
_SMALL_FRACTION = 0.01
_WHISKERS = "Whiskers: mean ± standard deviation between processes; none where there is one process."
#: Lengths of thousands as `16k`, which is 16 x 1024.
_IN_SHORT = "datum.value >= 1024 && datum.value % 1024 == 0 ? datum.value / 1024 + 'k' : format(datum.value, ',')"
#: An axis of lengths: each twice as long as the one before.
_BINARY = {"type": "log", "base": 2, "nice": False}

Spec = dict[str, Any]
#: Points have `series` (which decides the colour), `x`, `y` in the axis's unit, `tip`, and where known `low`, `high`,
#: and `outcome` (instead of `y`).
Points = Sequence[Spec]
ColumnOf = Callable[[str], Column]


@dataclass(frozen=True)
class ChartKind:
    """A kind of charts. `build` makes one of cells that share all facts that the spec does not name.

    `has_rows` says that it has a row for each cell, labelled with whatever differs; `by_baseline` that it has those of
    one baseline.
    """

    build: Callable[[ChartSpec, Frame, ColumnOf], Chart | None]
    has_rows: bool = False
    by_baseline: bool = False


def build_charts(spec: ChartSpec, kind: ChartKind, frame: Frame, column_of: ColumnOf) -> list[Chart]:
    """One chart for each combination of facts that the spec does not name, or for each baseline, that has anything to
    show; of more than MAX_CHARTS the last says how many were left out."""
    others = [] if kind.has_rows else [name for name in frame.differing() if name not in (spec.x, *spec.series)]
    if kind.by_baseline:
        others = frame.select(cell for cell in frame.facts.index if frame.base.get(cell) == cell).differing()
    charts = []
    for part in frame.by(others):
        if chart := kind.build(spec, part, column_of):
            title = ": ".join(filter(None, [spec.title, part.in_words(part.facts.index[0], others)]))
            whiskers = _WHISKERS if any("low" in point for point in chart.spec["data"]["values"]) else ""
            charts.append(Chart(title, chart.spec, f"{chart.caption} {whiskers}".strip()))
    more = len(charts) - MAX_CHARTS
    rest = Chart(f"{spec.title}: {more} more", {}, "They are left out; the tables have all figures.")
    return [*charts[:MAX_CHARTS], *([rest] if more > 0 else [])]


def rows_of(frame: Frame) -> list[tuple[str, int]]:
    """The cells in order, each with a label that says what differs."""
    names = frame.differing()
    return [(frame.in_words(cell, names) or frame.name(cell), cell) for cell in frame.ordered(names)]


# pictures


def _field(name: str, kind: str = "quantitative", **channel: Any) -> Spec:
    return {"field": name, "type": kind, **channel}


def _marks(kind: str, field: str, encoding: Spec, **look: Any) -> Spec:
    """Marks for the points that have the field."""
    known = {"filter": f"isValid(datum.{field})"}
    return {"mark": {"type": kind, **look}, "transform": [known], "encoding": encoding}


def _picture(
    points: Points, axes: Spec, values: str, marks: Sequence[Spec], outcomes_at: Any,
    height: Any = 230, layers: Sequence[Spec] = (), **look: Any,
) -> Spec:  # fmt: skip
    """Points as marks in the colours of their series, with a legend where there are several; over them whiskers and
    outcomes.

    Args:
        axes: the encodings of places and values, which all marks share.
        values: the channel of the values, x or y.
        outcomes_at: the place of outcomes in this channel; `look` is how they are written.
        height: of the picture in pixels, or of a row of it.
        layers: marks with data of their own, behind the others.
    """
    series = list(dict.fromkeys(point["series"] for point in points))
    scale = {"domain": series, "range": [colour(name, place) for place, name in enumerate(series, start=1)]}
    legend = {} if len(series) > 1 else {"legend": None}
    shared = {"color": _field("series", "nominal", scale=scale, **legend), "tooltip": _field("tip", "nominal")}
    above = {"color": {"value": "var(--text)"}, "text": {"field": "outcome"}}
    whiskers = {**above, values: {"field": "low"}, f"{values}2": {"field": "high"}}
    outcomes = _marks("text", "outcome", {**above, values: {"value": outcomes_at}}, fontSize=10, **look)
    return {
        "height": height,
        "data": {"values": [{"place": series.index(point["series"]), **point} for point in points]},
        "encoding": axes,
        "layer": [*layers, {"encoding": shared, "layer": [*marks, _marks("rule", "low", whiskers), outcomes]}],
    }


def line_chart(points: Points, x: Spec, y: Spec, *, point_size: int = 30, layers: Sequence[Spec] = ()) -> Spec:
    """Lines, each point with its whiskers; an outcome stands near the top where a run gave no value."""
    marks = [_marks("line", "y", {"tooltip": None}), _marks("point", "y", {}, filled=True, opacity=1, size=point_size)]
    return _picture(points, {"x": _field("x", **x), "y": _field("y", **y)}, "y", marks, 6, layers=layers)


def stacked_chart(points: Points, title: str) -> Spec:
    """A lying bar for each row, labelled above it, which leaves a phone's width to the bar."""
    rows = list(dict.fromkeys(point["x"] for point in points))
    axis = {"domain": False, "ticks": False, "labelAlign": "left", "labelPadding": -2, "labelOffset": -15}
    row = _field("x", "nominal", sort=rows, title=None, axis={**axis, "labelLimit": 600, "zindex": 1})
    bars = [_marks("bar", "y", {"order": {"field": "place"}}, height=14)]
    return _picture(
        points,
        {"y": row, "x": _field("y", title=title, scale={"nice": False})},
        "x",
        bars,
        4,
        {"step": 38},
        align="left",
    )


def _bar_chart(points: Points, x: Spec, y: Spec) -> Spec:
    """Bars side by side; on a log axis, where a bar's length means nothing, dots."""
    offset = _field("series", "nominal", sort=list(dict.fromkeys(point["series"] for point in points)))
    look = {"kind": "point", "filled": True, "size": 50} if "scale" in y else {"kind": "bar"}
    axes = {"x": _field("x", "nominal", **x), "xOffset": offset, "y": _field("y", **y)}
    bars = [_marks(field="y", encoding={}, **look)]
    return _picture(points, axes, "y", bars, "height", angle=270, align="left", dx=4)


# kinds


def points_of(column: Column, frame: Frame) -> dict[int, Spec]:
    """A cell's value in the column's unit with its interval between processes, or the outcome, and what is told of it
    under a pointer; a cell without either has no point."""
    values, scale = column.of(frame), column.unit.scale
    spread = column.numbers(frame).groupby(level=0).std().dropna() * scale if column.is_of_one_process else {}
    points: dict[int, Spec] = {}
    for cell in frame.facts.index:
        entry, label, name = values.get(cell), frame.label(cell), frame.name(cell)
        if cell not in frame.ok_cells:
            # `OOM (forward)` is OOM, `error: incorrect` is incorrect.
            points[cell] = {"outcome": label.partition(" (")[0].rpartition(": ")[2], "tip": f"{name}: {label}"}
        elif entry is not None and isinstance(entry.value, int | float):
            value = entry.value * scale
            tip = f"{name}: {column.title} {column.text(entry)} {column.unit.word}".rstrip()
            points[cell] = {"y": value, "tip": tip}
            if cell in spread:
                # As wide in logarithms, where it would reach below zero.
                low = value - spread[cell] if spread[cell] < value else value**2 / (value + spread[cell])
                points[cell] |= {"low": low, "high": value + spread[cell]}
    return points


def _axis(title: str, is_log: bool) -> Spec:
    return {"title": f"{title}, log", "scale": {"type": "log"}} if is_log else {"title": title}


def _figures(spec: ChartSpec, frame: Frame, column_of: ColumnOf) -> Chart | None:
    """A lying bar for each cell; or a line or bars over `x` for each combination of the facts that make the series.

    There are bars instead of lines where `x` has less than two numbers.
    """
    column, known = column_of(spec.y), frame.known
    numeric = [cell for cell in known if isinstance(known[cell].get(spec.x), int | float)]
    is_line = spec.kind == "lines" and len({known[cell][spec.x] for cell in numeric}) > 1
    frame = frame.select(numeric) if is_line else frame
    values = points_of(column, frame)
    places: list[tuple[str, Any, int]] = [("", label, cell) for label, cell in rows_of(frame)]
    if spec.kind != "rows":
        cells = frame.ordered([*spec.series, spec.x])
        places = [(frame.in_words(cell, spec.series), known[cell].get(spec.x), cell) for cell in cells]
    points = [
        {"series": label, "x": x if is_line else str(x), **values[cell]} for label, x, cell in places if cell in values
    ]
    series = {point["series"] for point in points}
    if (
        not any("y" in point for point in points)
        or len(series) > MAX_SERIES
        or not (is_line or len(points) <= MAX_BARS)
    ):
        return None
    title = column.heading(frame).heading
    if spec.kind == "rows":
        return Chart("", stacked_chart(points, title))
    if not is_line:
        order = [str(known[cell].get(spec.x)) for cell in frame.ordered([spec.x])]
        bars = {"sort": order, "title": heading(spec.x), "axis": {"labelAngle": 0}}
        return Chart("", _bar_chart(points, bars, _axis(title, spec.is_log)))
    ticks = {"labelExpr": _IN_SHORT, "values": sorted({point["x"] for point in points})}
    lengths = {"title": f"{heading(spec.x)}, log", "scale": _BINARY, "axis": ticks}
    return Chart("", line_chart(points, lengths, _axis(title, spec.is_log)))


def _stack(spec: ChartSpec, frame: Frame, column_of: ColumnOf) -> Chart | None:
    """Columns on top of each other, a lying bar for each cell that has them; the small ones and those beyond
    MAX_SERIES are the rest."""
    columns, rows = list(map(column_of, spec.of)), rows_of(frame)
    figures = {column.title: column.of(frame) for column in columns}
    values = {name: {cell: figure.value for cell, figure in cells.items()} for name, cells in figures.items()}
    table = pd.DataFrame(values, [cell for _, cell in rows], dtype=float).dropna(how="all").fillna(0.0)
    table *= columns[0].unit.scale
    if table.empty or len(table) > MAX_BARS:
        return None
    totals = table.sum(axis=1)
    longest = table.div(totals, axis=0).max().nlargest(MAX_SERIES - 1)
    shown = [name for name in table if longest.get(name, 0.0) >= _SMALL_FRACTION]
    others = [name for name in table if name not in shown and table[name].any()]
    table = table[shown].assign(rest=totals - table[shown].sum(axis=1)) if others else table[shown]
    unit = columns[0].unit.word
    points = [
        {"series": name, "x": row, "y": table[name][cell], "tip": f"{row}: {name} {table[name][cell]:.3g} {unit}"}
        for name in table
        for row, cell in rows
        if cell in table.index
    ]
    return Chart("", stacked_chart(points, unit), f"Rest: {', '.join(others)}." if others else "")


def _steps(spec: ChartSpec, frame: Frame, _column_of: ColumnOf) -> Chart | None:
    """Time of each of the first steps of one run of each cell, counted from the first step of the process."""
    times = [
        (frame.in_words(cell, [spec.x]), step.step, step.step_s)
        for cell in frame.ordered([spec.x])[:MAX_SERIES]
        for run in frame.runs_of(cell, "ok")[:1]
        for step in first_steps(run.path, _FIRST_STEPS)
    ]
    return _over_steps("", times, "One run of each; step 0 is the first of its process.", spec.is_log)


def steps_chart(path: Path) -> Chart | None:
    """The steps of a run's folder: their time and that of each phase, from the first on."""
    steps = first_steps(path, _MOST_STEPS)
    times = {span: [getattr(step, f"{span}_s") or 0.0 for step in steps] for span in (*SPANS[:1], *PHASES)}
    shown = [span for span in times if sum(times[span]) >= _SMALL_FRACTION * sum(times["step"])]
    points = [(span, step.step, time_s) for span in shown for step, time_s in zip(steps, times[span], strict=True)]
    more = f"The first {_MOST_STEPS:,} steps." if len(steps) == _MOST_STEPS else ""
    return _over_steps("Steps", points, more, is_log=True)


def _over_steps(
    title: str, times: Sequence[tuple[str, int | None, float | None]], caption: str, is_log: bool
) -> Chart | None:
    """A line for each series of (series, step, seconds)."""
    points = [
        {"series": name, "x": step, "y": time_s * 1e3, "tip": f"step {step}: {name} {time_s * 1e3:.4g} ms"}
        for name, step, time_s in times
        if time_s
    ]
    x = {"title": "step", "axis": {"tickMinStep": 1}}
    return Chart(title, line_chart(points, x, _axis("ms", is_log)), caption) if points else None


CHART_KINDS: Mapping[str, ChartKind] = {
    "bars": ChartKind(_figures),
    "lines": ChartKind(_figures),
    "rows": ChartKind(_figures, has_rows=True),
    "stack": ChartKind(_stack, has_rows=True),
    "steps": ChartKind(_steps),
}
