"""Charts of a view as Vega-Lite specifications: points with the interval between processes, or with the reason why one
is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmbench.records.vocabulary import MODES, PHASES
from lmbench.report import palette
from lmbench.report.answer import Chart
from lmbench.report.columns import Column, first_steps
from lmbench.report.facts import captioned, heading
from lmbench.report.frame import Frame
from lmbench.report.vega import colour
from lmbench.report.view import ChartSpec

#: Beyond these a picture tells less than the table: lines or bars side by side, bars in all, charts of one kind.
MAX_SERIES, MAX_BARS, MAX_CHARTS = 8, 40, 6
#: Steps shown of a run's beginning.
_FIRST_STEPS = 16
#: Phases below this share of every step are drawn with the rest.
_SMALL_FRACTION = 0.01
WHISKERS = "Whiskers: mean ± standard deviation between processes; none where there is one process."
#: Lengths of thousands as `16k`, which is 16 x 1024.
_IN_SHORT = "datum.value >= 1024 && datum.value % 1024 == 0 ? datum.value / 1024 + 'k' : format(datum.value, ',')"

Spec = dict[str, Any]
ColumnOf = Callable[[str], Column]


@dataclass(frozen=True)
class ChartKind:
    """A kind of charts. `build` makes one of cells that share all facts that the spec does not name.

    `has_rows` says that it has a row for each cell, labelled with whatever differs; `by_baseline` that it has those of
    one baseline. `spans` is what `y` may be where it is no column, such as a phase or the step.
    """

    build: Callable[[ChartSpec, Frame, ColumnOf], Chart | None]
    has_rows: bool = False
    by_baseline: bool = False
    spans: tuple[str, ...] = ()


@dataclass
class Series:
    """Values of one colour: `points` have `x`, `y` in the axis's unit, `tip`, and where known `low`, `high`,
    `outcome` (instead of `y`)."""

    label: str
    points: list[Spec]
    colour: int
    is_dashed: bool = False


def build_charts(spec: ChartSpec, kind: ChartKind, frame: Frame, column_of: ColumnOf) -> tuple[list[Chart], int]:
    """One chart for each combination of facts that the spec does not name, or for each baseline.

    Returns the charts that have anything to show, at most MAX_CHARTS, and how many were left out.
    """
    if spec.kind == "phases":
        # Of the mode with most phases.
        modes = sorted({str(frame.known[cell].get("mode")) for cell in frame.ok_cells}, key=MODES.index)
        frame = frame.select(cell for cell in frame.facts.index if frame.known[cell].get("mode") in modes[-1:])
    others = [] if kind.has_rows else [name for name in frame.differing() if name not in (spec.x, *spec.series)]
    if kind.by_baseline:
        others = frame.select(cell for cell in frame.facts.index if frame.base.get(cell) == cell).differing()
    charts = []
    for part in frame.by(others) if len(frame.facts) else ():
        chart = kind.build(spec, part, column_of)
        if chart is not None:
            title = ": ".join(filter(None, [spec.title, part.told(part.facts.index[0], others)]))
            charts.append(replace(chart, title=title))
    return charts[:MAX_CHARTS], len(charts[MAX_CHARTS:])


def rows_of(frame: Frame) -> list[tuple[str, int]]:
    """The cells in order, each with a label that says what differs."""
    names = frame.differing()
    return [(frame.told(cell, names) or frame.name(cell), cell) for cell in frame.ordered(names)]


# pictures


def _number(field: str, **channel: Any) -> Spec:
    return {"field": field, "type": "quantitative", **channel}


def _word(field: str, **channel: Any) -> Spec:
    return {"field": field, "type": "nominal", **channel}


_TIP = {"tooltip": _word("tip")}
_OUTCOME = {"text": {"field": "outcome"}, **_TIP}


def _mark(kind: str, field: str, encoding: Spec, **look: Any) -> Spec:
    """A layer of marks for the points that have the field."""
    known = {"filter": f"isValid(datum.{field})"}
    return {"mark": {"type": kind, **look}, "transform": [known], "encoding": encoding}


def _by_dash(plain: Any, dashed: Any) -> Spec:
    return _word("dashed", legend=None, scale={"domain": [False, True], "range": [plain, dashed]})


def _shades(series: Sequence[Series]) -> Spec:
    """The encoding of series by their colours, with a legend where there are several."""
    scale = {"domain": [each.label for each in series], "range": [colour(each.colour) for each in series]}
    return {"color": _word("series", scale=scale, **({} if len(series) > 1 else {"legend": None}))}


def _picture(series: Sequence[Series], encoding: Spec, layers: Sequence[Spec], height: Any = 230) -> Spec:
    points = [
        {"series": each.label, "place": place, "dashed": each.is_dashed, **point}
        for place, each in enumerate(series)
        for point in each.points
    ]
    return {"height": height, "data": {"values": points}, "encoding": encoding, "layer": list(layers)}


def line_chart(
    series: Sequence[Series], x: Spec, y: Spec, *, has_points: bool = True, layers: Sequence[Spec] = ()
) -> Spec:
    """Lines, each point with its whiskers; a cross near the top where a run gave no value."""
    shades, value = _shades(series), {"y": _number("y", **y)}
    ends = {"y": _number("low", **y), "y2": {"field": "high"}}
    marks = [
        _mark("line", "y", {**value, **shades, "strokeDash": _by_dash([1, 0], [5, 3])}),
        _mark("rule", "low", {**ends, **shades}),
        _mark("point", "outcome", {**shades, **_TIP}, shape="cross", angle=45, y=6),
        _mark("text", "outcome", _OUTCOME, y=6, dx=-8, align="right", fontSize=10),
        _mark("point", "y", {**value, **shades, **_TIP}, filled=True, opacity=1, size=30 if has_points else 4),
    ]
    return _picture(series, {"x": _number("x", **x)}, [*layers, *marks])


def stacked_chart(series: Sequence[Series], title: str) -> Spec:
    """A lying bar for each row, labelled above it, which leaves a phone's width to the bar."""
    rows = list(dict.fromkeys(point["x"] for each in series for point in each.points))
    axis = {"domain": False, "ticks": False, "labelAlign": "left", "labelPadding": -2, "labelOffset": -15}
    row = _word("x", sort=rows, title=None, axis={**axis, "labelLimit": 600, "zindex": 1})
    bars = {"x": _number("y", title=title), **_shades(series), "order": {"field": "place"}, **_TIP}
    marks = [
        _mark("bar", "y", bars, height=14),
        _mark("rule", "low", {"x": _number("low", title=title), "x2": {"field": "high"}}),
        _mark("text", "outcome", _OUTCOME, align="left", x=4, fontSize=10),
    ]
    return _picture(series, {"y": row}, marks, {"step": 38})


def _bar_chart(series: Sequence[Series], x: Spec, y: Spec, is_log: bool) -> Spec:
    """Bars side by side; on a log axis, where a bar's length means nothing, dots."""
    encoding = {"x": _word("x", **x), "xOffset": _word("series", sort=[each.label for each in series])}
    bars = {"y": _number("y", **y), **_shades(series), "opacity": _by_dash(1, 0.55), **_TIP}
    look = {"kind": "point", "filled": True, "size": 50} if is_log else {"kind": "bar"}
    marks = [
        _mark(field="y", encoding=bars, **look),
        _mark("rule", "low", {"y": _number("low", **y), "y2": {"field": "high"}}),
        _mark("text", "outcome", _OUTCOME, angle=270, align="left", y="height", dx=4, fontSize=10),
    ]
    return _picture(series, encoding, marks)


# kinds


def _points(column: Column, frame: Frame) -> dict[int, Spec]:
    """A cell's value in the column's unit with its interval between processes, or the outcome, and what is told of it
    under a pointer; a cell without either has no point."""
    values, scale, unit = column.of(frame), column.unit.scale, column.unit.word
    spread = column.numbers(frame).groupby(level=0).std().dropna() if column.is_of_one_process else {}
    points: dict[int, Spec] = {}
    for cell in frame.facts.index:
        entry, label, name = values.get(cell), frame.label(cell), frame.name(cell)
        if cell not in frame.ok_cells:
            # `OOM (forward)` is OOM, `error: incorrect` is incorrect.
            points[cell] = {"outcome": label.partition(" (")[0].rpartition(": ")[2], "tip": f"{name}: {label}"}
        elif entry is not None and isinstance(entry.value, int | float):
            tip = f"{name}: {column.title} {column.text(entry)} {unit}".rstrip()
            points[cell] = {"y": entry.value * scale, "tip": tip}
            if cell in spread:
                ends = {"low": entry.value - spread[cell], "high": entry.value + spread[cell]}
                points[cell] |= {end: value * scale for end, value in ends.items()}
    return points


def _series(spec: ChartSpec, frame: Frame, column: Column) -> list[Series]:
    """A series for each combination of the spec's facts; none where nothing can be drawn."""
    colours = palette.SeriesColours(spec.series, list(frame.known.values()))
    points, series = _points(column, frame), dict[str, Series]()
    for cell in filter(points.__contains__, frame.ordered([*spec.series, spec.x])):
        x, label = frame.known[cell].get(spec.x), frame.in_short(cell, spec.series)
        line = series.setdefault(label, Series(label, [], *colours.of(frame.known[cell])))
        line.points.append({"x": x if isinstance(x, int | float) else str(x), **points[cell]})
    is_known = any("y" in point for point in points.values())
    return list(series.values()) if is_known and len(series) <= MAX_SERIES else []


def _axis(column: Column, frame: Frame, is_log: bool) -> Spec:
    title = column.heading(frame).title
    title = f"{title} ({column.unit.word})" if column.unit.word else title
    return {"title": f"{title}, log", "scale": {"type": "log"}} if is_log else {"title": title}


def _caption(series: Sequence[Series], *others: str) -> str:
    whiskers = WHISKERS if any("low" in point for each in series for point in each.points) else ""
    return " ".join(filter(None, [*others, whiskers]))


def _bars(spec: ChartSpec, frame: Frame, column_of: ColumnOf) -> Chart | None:
    column = column_of(spec.y)
    series = _series(spec, frame, column)
    categories = list(dict.fromkeys(str(frame.known[cell].get(spec.x)) for cell in frame.ordered([spec.x])))
    if not series or len(categories) * len(series) > MAX_BARS:
        return None
    for point in (point for each in series for point in each.points):
        point["x"] = str(point["x"])
    x = {"sort": categories, "title": heading(spec.x), "axis": {"labelAngle": 0}}
    picture = _bar_chart(series, x, _axis(column, frame, spec.is_log), spec.is_log)
    picture["layer"] += _limit(column, frame, series)
    return Chart("", picture, _caption(series))


def _limit(column: Column, frame: Frame, series: Sequence[Series]) -> list[Spec]:
    """The device's memory as a level to mark, where all cells have the same and come near to it."""
    totals = {run.record.memory.device_total_bytes for run in frame.runs[frame.runs.is_shown].run} - {None, 0}
    highest = max(point.get("y", 0.0) for each in series for point in each.points)
    if column.name != "peak_bytes" or len(totals) != 1 or highest < 0.4 * (total := min(totals) * column.unit.scale):
        return []
    text = {"text": {"value": f"device memory {total:.1f} GiB"}}
    data = {"data": {"values": [{"y": total}]}, "encoding": {"y": _number("y")}}
    words = {"mark": {"type": "text", "align": "left", "x": 4, "dy": 9, "fontSize": 10}, "encoding": text}
    return [{**data, "layer": [{"mark": {"type": "rule", "strokeDash": [5, 3]}}, words]}]


def _lines(spec: ChartSpec, frame: Frame, column_of: ColumnOf) -> Chart | None:
    column = column_of(spec.y)
    numeric = [cell for cell, known in frame.known.items() if isinstance(known.get(spec.x), int | float)]
    if len({frame.known[cell][spec.x] for cell in numeric}) < 2:
        return _bars(spec, frame, column_of)
    part = frame.select(numeric)
    series = _series(spec, part, column)
    if not series:
        return None
    places = sorted({point["x"] for each in series for point in each.points})
    axis: Spec = {"labelExpr": _IN_SHORT} | ({"values": places} if len(places) <= 12 else {})
    scale = {"type": "log", "base": 2, "domain": [places[0], places[-1]]}
    x = {"title": f"{heading(spec.x)}, log", "scale": scale, "axis": axis}
    layers, caption = _limit(column, part, series), ""
    known = [point for point in series[0].points if "y" in point]
    if spec.power is not None and spec.is_log and known:
        # What grows with that power of x, from the lowest level that is shown to the last point of the first series.
        last, lowest = known[-1], min(point["y"] for each in series for point in each.points if "y" in point)
        left = max(places[0], last["x"] * (lowest / last["y"]) ** (1 / spec.power))
        name = f"{heading(spec.x)}^{spec.power:g}"
        ends = [{"x": left, "y": last["y"] * (left / last["x"]) ** spec.power}, {"x": last["x"], "y": last["y"]}]
        guide = {"type": "line", "strokeDash": [4, 3], "color": colour(palette.MUTED)}
        layers.append({"data": {"values": ends}, "mark": guide, "encoding": {"y": _number("y")}})
        caption = f"Dashed: {name}, through the last point of {series[0].label or 'the line'}."
    picture = line_chart(series, x, _axis(column, part, spec.is_log), layers=layers)
    return Chart("", picture, _caption(series, caption))


def _rows(spec: ChartSpec, frame: Frame, column_of: ColumnOf) -> Chart | None:
    column, points = column_of(spec.y), _points(column_of(spec.y), frame)
    series = [Series("", [{**points[cell], "x": label} for label, cell in rows_of(frame) if cell in points], 1)]
    if not any("y" in point for point in series[0].points) or len(points) > MAX_BARS:
        return None
    return Chart("", stacked_chart(series, _axis(column, frame, False)["title"]), _caption(series))


def _phases(_spec: ChartSpec, frame: Frame, _column_of: ColumnOf) -> Chart | None:
    rows = rows_of(frame.select(cell for cell in frame.facts.index if cell in frame.ok_cells))
    if not rows or len(rows) > MAX_BARS:
        return None

    def mean_ms(cell: int, span: str) -> float:
        return float(means[span].get(cell, 0.0)) * 1e3

    means = {span: frame.numbers(f"phases.{span}.mean_s").groupby(level=0).mean() for span in ("step", *PHASES)}
    shares = {span: frame.numbers(f"phases.{span}.share_fraction").groupby(level=0).mean() for span in PHASES}
    shown = [span for span in PHASES if span != "other" and (shares[span] >= _SMALL_FRACTION).any()]
    series = []
    for name in [*shown, "rest"]:
        points = []
        for label, cell in rows:
            rest = max(0.0, mean_ms(cell, "step") - sum(mean_ms(cell, span) for span in shown))
            value = rest if name == "rest" else mean_ms(cell, name)
            points.append({"x": label, "y": value, "tip": f"{label}: {name} {value:.3g} ms"})
        series.append(Series(name, points, palette.PHASES.get(name, palette.MUTED)))
    mode = frame.known[rows[0][1]].get("mode")
    caption = f"Mean of each phase, {mode}; phases under 1 % of the step are in the rest."
    return Chart("", stacked_chart(series, "step (ms)"), caption)


def _steps(spec: ChartSpec, frame: Frame, _column_of: ColumnOf) -> Chart | None:
    """Time of each of the first steps of one run of each cell, counted from the first step of the process."""
    series = []
    for place, cell in enumerate(frame.ordered([spec.x])[:MAX_SERIES], start=1):
        steps = first_steps(frame.runs_of(cell, "ok")[0], _FIRST_STEPS) if cell in frame.ok_cells else []
        times = [(each.step, each.step_s * 1e3) for each in steps if each.step is not None and each.step_s is not None]
        points = [{"x": step, "y": ms, "tip": f"step {step}: {ms:.4g} ms"} for step, ms in times]
        if points:
            series.append(Series(captioned(spec.x, frame.known[cell].get(spec.x)), points, place))
    if not series:
        return None
    y = {"title": "step (ms), log", "scale": {"type": "log"}} if spec.is_log else {"title": "step (ms)"}
    picture = line_chart(series, {"title": "step", "axis": {"tickMinStep": 1}}, y)
    return Chart("", picture, "One run of each; step 0 is the first of its process.")


CHART_KINDS: Mapping[str, ChartKind] = {
    "bars": ChartKind(_bars),
    "lines": ChartKind(_lines),
    "rows": ChartKind(_rows, has_rows=True),
    "phases": ChartKind(_phases, has_rows=True),
    "steps": ChartKind(_steps),
}
