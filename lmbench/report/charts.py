"""Charts of a view from the cells of one device, before they are pictures: series of points, each with its interval or
with the reason why it is missing."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from lmbench.records.statistics import sample_std
from lmbench.records.vocabulary import PHASES, Span
from lmbench.report import palette
from lmbench.report.cells import Cell, Pairing, differing, in_order, in_short, told
from lmbench.report.columns import Column, mean_of, numbers
from lmbench.report.facts import captioned, heading, sort_key
from lmbench.report.view import ChartSpec

#: Beyond these a picture tells less than the table: lines or bars side by side, bars in all, charts of one kind.
MAX_SERIES, MAX_BARS, MAX_CHARTS = 8, 40, 6
#: Steps shown of a run's beginning.
FIRST_STEPS = 16
#: Phases below this share of every step are drawn with the rest.
_SMALL_FRACTION = 0.01
#: What whiskers are, in every chart of every page.
WHISKERS = "mean ± standard deviation between processes; none where there is one process"


@dataclass(frozen=True)
class Point:
    """One value in the chart's unit with the ends of its interval; None with the outcome where there is none.

    `tip` is what a pointer over the mark shows.
    """

    x: str | float
    y: float | None
    low: float | None = None
    high: float | None = None
    outcome: str = ""
    tip: str = ""


@dataclass(frozen=True)
class Series:
    """Points that belong together; `label` is empty where there is only one series.

    `colour` is the place of its colour (see colours), None for one by the order of the series.
    """

    label: str
    points: list[Point]
    colour: int | None = None
    is_dashed: bool = False


@dataclass(frozen=True)
class Guide:
    """A line without data, from end to end."""

    ends: tuple[tuple[float, float], tuple[float, float]]
    name: str


@dataclass(frozen=True)
class Chart:
    """A chart, ready to be drawn.

    `kind` is `bars`, `rows`, `lines`, `phases` or `steps` (see ChartSpec). `categories` are the places of bars, in
    order. `limit` is a level to mark, with its name. `guide` is a line to compare with. `band` are places with two
    values to shade between, with its name; `span` is what the axis of values spans, where that is given.
    """

    kind: str
    x_label: str
    y_label: str
    series: list[Series]
    title: str = ""
    caption: str = ""
    is_log: bool = False
    limit: tuple[float, str] | None = None
    guide: Guide | None = None
    categories: list[str] = field(default_factory=list)
    band: list[tuple[float, float, float]] = field(default_factory=list)
    band_label: str = ""
    span: tuple[float, float] | None = None

    @property
    def highest(self) -> float:
        return max((p.high or p.y or 0.0 for series in self.series for p in series.points), default=0.0)

    @property
    def lowest(self) -> float:
        return min((p.y for series in self.series for p in series.points if p.y), default=0.0)

    @property
    def has_whiskers(self) -> bool:
        return any(point.low is not None for series in self.series for point in series.points)

    @property
    def most_missing(self) -> int:
        """The largest number of points that are missing in one place."""
        missing = Counter(point.x for series in self.series for point in series.points if point.outcome)
        return max(missing.values(), default=0)


#: What a chart's `y` is by its name.
ColumnOf = Callable[[str], Column]


@dataclass(frozen=True)
class ChartKind:
    """A kind of chart: what makes one of the cells that share all facts that the spec does not name.

    `has_rows` says that it has a row for each cell, labelled with whatever differs; `by_baseline` that it has those of
    one baseline. `spans` is what `y` may be where it is no column, such as a phase or the step.
    """

    build: Callable[[ChartSpec, Sequence[Cell], Pairing, ColumnOf], Chart | None]
    has_rows: bool = False
    by_baseline: bool = False
    spans: tuple[str, ...] = ()


def build_charts(
    spec: ChartSpec, kind: ChartKind, cells: Sequence[Cell], pairing: Pairing, column_of: ColumnOf
) -> tuple[list[Chart], int]:
    """One chart for each combination of facts that the spec does not name, or for each baseline.

    Returns the charts that have anything to show, at most MAX_CHARTS, and how many were left out.
    """
    if spec.kind == "phases":
        cells = _of_richest_mode(cells)
    others = [] if kind.has_rows else [name for name in differing(cells) if name not in (spec.x, *spec.series)]
    if kind.by_baseline:
        others = differing([cell for cell in cells if pairing.of(cell) is cell])
    charts = []
    for _, group in groupby(in_order(cells, others), key=lambda cell: [cell.facts.get(name) for name in others]):
        same = list(group)
        chart = kind.build(spec, same, pairing, column_of)
        if chart is not None:
            charts.append(replace(chart, title=": ".join(filter(None, [spec.title, told(same[0], others)]))))
    return charts[:MAX_CHARTS], len(charts[MAX_CHARTS:])


def rows_of(cells: Sequence[Cell]) -> list[tuple[str, Cell]]:
    """The cells in order, each with a label that says what differs."""
    names = differing(cells)
    return [(told(cell, names) or cell.name, cell) for cell in in_order(cells, names)]


def _of_richest_mode(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of the mode with most phases."""
    order = sorted({cell.facts.get("mode") for cell in cells if cell.ok}, key=lambda mode: sort_key("mode", mode)[:2])
    return [cell for cell in cells if order and cell.facts.get("mode") == order[-1]]


def _bars(spec: ChartSpec, cells: Sequence[Cell], pairing: Pairing, column_of: ColumnOf) -> Chart | None:
    chart = _by_series(spec, cells, pairing, column_of(spec.y))
    if chart is None:
        return None
    categories = list(dict.fromkeys(str(cell.facts.get(spec.x)) for cell in in_order(cells, [spec.x])))
    is_full = len(categories) * len(chart.series) > MAX_BARS
    return None if is_full else replace(chart, categories=categories)


def _lines(spec: ChartSpec, cells: Sequence[Cell], pairing: Pairing, column_of: ColumnOf) -> Chart | None:
    numeric = [cell for cell in cells if isinstance(cell.facts.get(spec.x), int | float)]
    if len({cell.facts[spec.x] for cell in numeric}) < 2:
        return _bars(spec, cells, pairing, column_of)
    chart = _by_series(spec, numeric, pairing, column_of(spec.y))
    return None if chart is None else _with_guide(replace(chart, kind="lines"), spec.power)


def _with_guide(chart: Chart, power: float | None) -> Chart:
    """The chart with what grows with a power of x, from the lowest level that it shows to the last point of its first
    series."""
    known = [(float(point.x), point.y) for point in chart.series[0].points if point.y]
    begin = min(float(point.x) for series in chart.series for point in series.points)
    if power is None or not chart.is_log or not known:
        return chart
    x, y = known[-1]
    left = max(begin, x * (chart.lowest / y) ** (1 / power))
    guide = Guide(((left, y * (left / x) ** power), (x, y)), f"{chart.x_label}^{power:g}")
    series = chart.series[0].label or "the line"
    return replace(chart, guide=guide, caption=f"Dashed: {guide.name}, through the last point of {series}.")


def _by_series(spec: ChartSpec, cells: Sequence[Cell], pairing: Pairing, column: Column) -> Chart | None:
    groups: dict[str, list[Point]] = {}
    colours, looks = palette.SeriesColours(spec.series, [cell.facts for cell in cells]), dict[str, tuple[int, bool]]()
    for cell in in_order(cells, [*spec.series, spec.x]):
        x = cell.facts.get(spec.x)
        point = _point(cell, x if isinstance(x, int | float) else str(x), column, pairing)
        label = in_short(cell, spec.series)
        groups.setdefault(label, []).append(point)
        looks.setdefault(label, colours.of(cell.facts))
    # A series without a value or an outcome (the cold compilation of an eager run) is none.
    groups = {label: points for label, points in groups.items() if any(p.y is not None or p.outcome for p in points)}
    if not any(point.y is not None for points in groups.values() for point in points) or len(groups) > MAX_SERIES:
        return None
    return Chart(
        kind="bars",
        x_label=heading(spec.x),
        y_label=column.heading,
        series=[Series(label, points, *looks[label]) for label, points in groups.items()],
        is_log=spec.is_log,
        limit=_device_memory(cells) if column.name == "peak_bytes" else None,
    )


def _rows(spec: ChartSpec, cells: Sequence[Cell], pairing: Pairing, column_of: ColumnOf) -> Chart | None:
    if len(cells) > MAX_BARS:
        return None
    column = column_of(spec.y)
    points = [_point(cell, label, column, pairing) for label, cell in rows_of(cells)]
    if not any(point.y is not None for point in points):
        return None
    return Chart("rows", "", column.heading, [Series("", points)])


def _point(cell: Cell, x: str | float, column: Column, pairing: Pairing) -> Point:
    """A cell's point at `x`."""
    if not cell.ok:
        return Point(x, None, outcome=cell.label, tip=f"{cell.name}: {cell.label}")
    measure, scale = column.of(cell, pairing), column.unit.scale
    if measure is None:
        return Point(x, None)
    low, high = (None if end is None else end * scale for end in interval(cell, column))
    tip = f"{cell.name}: {column.show(measure)}, {column.heading}"
    return Point(x, measure.value * scale, low, high, tip=tip)


def interval(cell: Cell, column: Column) -> tuple[float | None, float | None]:
    """Mean minus and plus the standard deviation between processes, in SI; None of one process."""
    values = numbers(cell, column.of_run) if column.of_run is not None else []
    mean = statistics.fmean(values) if values else 0.0
    std = sample_std(values, mean)
    return (None, None) if std is None else (mean - std, mean + std)


def _device_memory(cells: Sequence[Cell]) -> tuple[float, str] | None:
    """The device's memory in GiB as a level to mark, where all cells have the same."""
    totals = {total for cell in cells for s in cell.samples if (total := s.record.memory.device_total_bytes)}
    if len(totals) != 1:
        return None
    total_gib = totals.pop() * 2.0**-30
    return total_gib, f"device memory {total_gib:.1f} GiB"


def _phases(_spec: ChartSpec, cells: Sequence[Cell], _pairing: Pairing, _column_of: ColumnOf) -> Chart | None:
    rows = rows_of([cell for cell in cells if cell.ok])
    if not rows or len(rows) > MAX_BARS:
        return None
    shown = [phase for phase in PHASES if phase != "other" and any(_is_long(cell, phase) for _, cell in rows)]
    series = []
    for phase in [*shown, None]:
        name = phase or "rest"
        points = []
        for label, cell in rows:
            rest_ms = _mean_ms(cell, "step") - sum(_mean_ms(cell, each) for each in shown)
            ms = max(0.0, rest_ms) if phase is None else _mean_ms(cell, phase)
            points.append(Point(label, ms, tip=f"{label}: {name} {ms:.3g} ms"))
        series.append(Series(name, points, palette.PHASES.get(name, palette.MUTED)))
    mode = rows[0][1].facts.get("mode")
    caption = f"Mean of each phase, {mode}; phases under 1 % of the step are in the rest."
    return Chart("phases", "", "step (ms)", series, caption=caption, categories=[label for label, _ in rows])


def _is_long(cell: Cell, phase: Span) -> bool:
    summaries = [found for sample in cell.ok if (found := sample.record.phases.get(phase)) is not None]
    shares = [found.share_fraction for found in summaries if found.share_fraction is not None]
    return bool(shares) and statistics.fmean(shares) >= _SMALL_FRACTION


def _mean_ms(cell: Cell, span: Span) -> float:
    return statistics.fmean(numbers(cell, mean_of(span)) or [0.0]) * 1e3


def _steps(spec: ChartSpec, cells: Sequence[Cell], _pairing: Pairing, _column_of: ColumnOf) -> Chart | None:
    """Time of each of the first steps of one run of each cell, counted from the first step of the process."""
    series = []
    for cell in in_order(cells, [spec.x])[:MAX_SERIES]:
        steps = cell.ok[0].first_steps(FIRST_STEPS) if cell.ok else []
        times = [(float(s.step), s.step_s * 1e3) for s in steps if s.step is not None and s.step_s is not None]
        if times:
            points = [Point(index, ms, tip=f"step {index:.0f}: {ms:.4g} ms") for index, ms in times]
            series.append(Series(captioned(spec.x, cell.facts.get(spec.x)), points))
    if not series:
        return None
    caption = "One run of each; step 0 is the first of its process."
    return Chart("steps", "step", "step (ms)", series, caption=caption, is_log=spec.is_log)


CHART_KINDS: Mapping[str, ChartKind] = {
    "bars": ChartKind(_bars),
    "lines": ChartKind(_lines),
    "rows": ChartKind(_rows, has_rows=True),
    "phases": ChartKind(_phases, has_rows=True),
    "steps": ChartKind(_steps),
}
