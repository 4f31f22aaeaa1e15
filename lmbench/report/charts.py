"""Charts of a view from the cells of one device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from lmbench.kernels.shown.charts import kernel_chart
from lmbench.records.vocabulary import PHASES
from lmbench.report.cells import Cell, in_order, varying
from lmbench.report.chart import Chart, Point, Series
from lmbench.report.colours import MUTED, PHASE_COLOURS
from lmbench.report.columns import numbers
from lmbench.report.facts import FP32_MATMUL, TF32_MATMUL, captioned, heading, in_words, is_consequence, sort_key
from lmbench.report.intervals import device_memory, make_point, whiskers
from lmbench.report.relative import COLUMN, Pairing
from lmbench.report.views.view import ChartSpec

#: Beyond these a picture tells less than the table: lines or bars side by side, bars in all, charts of one kind.
MAX_SERIES, MAX_BARS, MAX_CHARTS = 8, 40, 6
#: Kinds with a row for each cell, labelled with whatever differs.
_ROW_KINDS = ("rows", "phases", "parts", "kinds", "attention")
#: Steps shown of a run's beginning.
FIRST_STEPS = 16
#: Phases below this share of every step are drawn with the rest.
_SMALL_FRACTION = 0.01


def build_charts(spec: ChartSpec, cells: Sequence[Cell], pairing: Pairing) -> tuple[list[Chart], int]:
    """One chart for each combination of facts that the spec does not name.

    Returns the charts that have anything to show, at most MAX_CHARTS, and how many were left out.
    """
    if spec.kind == "phases":
        cells = _of_richest_mode(cells)
    differing = [name for name in varying(cells) if not is_consequence(name)]
    own = set(differing) if spec.kind in _ROW_KINDS else {spec.x, *spec.series}
    others = [name for name in differing if name not in own]
    charts = []
    for _, group in groupby(in_order(cells, others), key=lambda cell: [cell.facts.get(name) for name in others]):
        same = list(group)
        chart = _BUILDERS[spec.kind](spec, same, pairing)
        if chart is not None:
            charts.append(replace(chart, title=": ".join(filter(None, [spec.title, _words(same[0], others)]))))
    return charts[:MAX_CHARTS], len(charts[MAX_CHARTS:])


def _words(cell: Cell, names: Sequence[str]) -> str:
    return ", ".join(in_words(name, cell.facts[name]) for name in names if cell.facts.get(name) is not None)


def _of_richest_mode(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of the mode with most phases."""
    order = sorted({cell.facts.get("mode") for cell in cells if cell.ok}, key=lambda mode: sort_key("mode", mode)[:2])
    return [cell for cell in cells if order and cell.facts.get("mode") == order[-1]]


def _bars(spec: ChartSpec, cells: Sequence[Cell], pairing: Pairing) -> Chart | None:
    chart = _by_series(spec, cells, pairing)
    if chart is None:
        return None
    categories = list(dict.fromkeys(str(cell.facts.get(spec.x)) for cell in in_order(cells, [spec.x])))
    is_full = len(categories) * len(chart.series) > MAX_BARS
    return None if is_full else replace(chart, categories=categories)


def _lines(spec: ChartSpec, cells: Sequence[Cell], pairing: Pairing) -> Chart | None:
    numeric = [cell for cell in cells if isinstance(cell.facts.get(spec.x), int | float)]
    if len({cell.facts[spec.x] for cell in numeric}) < 2:
        return _bars(spec, cells, pairing)
    chart = _by_series(spec, numeric, pairing)
    return None if chart is None else replace(chart, kind="lines")


def _by_series(spec: ChartSpec, cells: Sequence[Cell], pairing: Pairing) -> Chart | None:
    groups: dict[str, list[Point]] = {}
    for cell in in_order(cells, [*spec.series, spec.x]):
        x = cell.facts.get(spec.x)
        point = make_point(cell, x if isinstance(x, int | float) else str(x), spec.y, pairing)
        groups.setdefault(series_label(cell, spec.series), []).append(point)
    # A series without a value or an outcome (the cold compilation of an eager run) is none.
    groups = {label: points for label, points in groups.items() if any(p.y is not None or p.outcome for p in points)}
    if not any(point.y is not None for points in groups.values() for point in points) or len(groups) > MAX_SERIES:
        return None
    return Chart(
        kind="bars",
        x_label=heading(spec.x),
        y_label=COLUMN[spec.y].heading,
        series=[Series(label, points) for label, points in groups.items()],
        whiskers=whiskers(cells, spec.y),
        is_log=spec.is_log,
        limit=device_memory(cells) if spec.y == "peak_bytes" else None,
    )


def _rows(spec: ChartSpec, cells: Sequence[Cell], pairing: Pairing) -> Chart | None:
    names = [name for name in varying(cells) if not is_consequence(name)]
    if len(cells) > MAX_BARS:
        return None
    ordered = in_order(cells, names)
    points = [make_point(cell, _words(cell, names) or cell.name, spec.y, pairing) for cell in ordered]
    if not any(point.y is not None for point in points):
        return None
    return Chart("rows", "", COLUMN[spec.y].heading, [Series("", points)], whiskers=whiskers(cells, spec.y))


def _phases(_spec: ChartSpec, cells: Sequence[Cell], _pairing: Pairing) -> Chart | None:
    ok = [cell for cell in in_order(cells, varying(cells)) if cell.ok]
    if not ok or len(ok) > MAX_BARS:
        return None
    names = varying(ok)
    labels = [_words(cell, names) or cell.name for cell in ok]
    shown = [phase for phase in PHASES if phase != "other" and any(_share(cell, phase) for cell in ok)]
    series = []
    for phase in [*shown, "rest"]:
        times = [_rest_ms(cell, shown) if phase == "rest" else _phase_ms(cell, phase) for cell in ok]
        tips = [f"{label}: {phase} {ms:.3g} ms" for label, ms in zip(labels, times, strict=True)]
        points = [Point(label, ms, tip=tip) for label, ms, tip in zip(labels, times, tips, strict=True)]
        series.append(Series(phase, points, PHASE_COLOURS.get(phase, MUTED)))
    caption = f"Mean of each phase, {ok[0].facts.get('mode')}; phases under 1 % of the step are in the rest."
    return Chart("phases", "", "step (ms)", series, caption=caption, categories=labels)


def _share(cell: Cell, phase: str) -> bool:
    shares = numbers(cell, f"phases.{phase}.share_fraction")
    return bool(shares) and statistics.fmean(shares) >= _SMALL_FRACTION


def _phase_ms(cell: Cell, phase: str) -> float:
    return statistics.fmean(numbers(cell, f"phases.{phase}.mean_s") or [0.0]) * 1e3


def _rest_ms(cell: Cell, shown: Sequence[str]) -> float:
    return max(0.0, _phase_ms(cell, "step") - sum(_phase_ms(cell, phase) for phase in shown))


def _steps(spec: ChartSpec, cells: Sequence[Cell], _pairing: Pairing) -> Chart | None:
    """Time of each of the first steps of one run of each cell, counted from the first step of the process."""
    series = []
    for cell in in_order(cells, [spec.x])[:MAX_SERIES]:
        steps = cell.ok[0].first_steps(FIRST_STEPS) if cell.ok else []
        times = [(float(step["step"]), step["step_s"] * 1e3) for step in steps if step.get("step_s") is not None]
        if times:
            points = [Point(index, ms, tip=f"step {index:.0f}: {ms:.4g} ms") for index, ms in times]
            series.append(Series(captioned(spec.x, cell.facts.get(spec.x)), points))
    if not series:
        return None
    caption = "One run of each; step 0 is the first of its process."
    return Chart("steps", "step", "step (ms)", series, caption=caption, is_log=spec.is_log)


def _kernels(spec: ChartSpec, cells: Sequence[Cell], _pairing: Pairing) -> Chart | None:
    names = [name for name in varying(cells) if not is_consequence(name)]
    ordered = [cell for cell in in_order(cells, names) if cell.ok]
    if len(ordered) > MAX_BARS:
        return None
    return kernel_chart(spec.kind, spec.y, ordered, [_words(cell, names) or cell.name for cell in ordered])


_BUILDERS: dict[str, Callable[[ChartSpec, Sequence[Cell], Pairing], Chart | None]] = {
    "bars": _bars,
    "lines": _lines,
    "rows": _rows,
    "phases": _phases,
    "steps": _steps,
    "parts": _kernels,
    "kinds": _kernels,
    "attention": _kernels,
}


_SHORT = {("32-true", FP32_MATMUL): "fp32", ("32-true", TF32_MATMUL): "TF32"}


def series_label(cell: Cell, names: Sequence[str]) -> str:
    """A series by its facts; the precision pair by the word that people use for it."""
    precision, matmul = str(cell.facts.get("precision")), str(cell.facts.get("matmul"))
    words = {"precision": _SHORT.get((precision, matmul), precision), "matmul": ""}
    return ", ".join(filter(None, (words.get(name, in_words(name, cell.facts.get(name))) for name in names)))
