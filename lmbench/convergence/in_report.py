"""What convergence adds to a report: columns of how a row trains against its baseline, a chart of its curves, and the
answer: what to take and what not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from lmbench.convergence.judgement import (
    SMOOTHED_FRACTION,
    Curve,
    Judgement,
    curve_of,
    judge,
    ratio,
    share,
    steps_to_loss,
)
from lmbench.report import units
from lmbench.report.answer import Cell, Chart
from lmbench.report.catalogue import Feature
from lmbench.report.charts import MAX_SERIES, ChartKind, ColumnOf, Series, Spec, line_chart
from lmbench.report.columns import BASELINE, STEP, Column
from lmbench.report.frame import Frame
from lmbench.report.palette import series_looks
from lmbench.report.units import SECONDS, TIMES, Unit
from lmbench.report.view import ChartSpec

#: Points of a curve on a page: more are not seen.
_MAX_POINTS = 300
#: The axis of differences ends at so many times the band of the baseline's seeds: what runs away leaves it.
_BANDS = 5


def curves_of(frame: Frame, cell: int) -> dict[Any, Curve]:
    """The curve of a cell's first run of each seed."""
    curves = {seed: curve_of(run) for seed, run in frame.by_seed(cell).items()}
    return {seed: curve for seed, curve in curves.items() if curve is not None}


@lru_cache(maxsize=4)
def judgements(frame: Frame) -> dict[int, Judgement]:
    """The judgement on each cell that has a baseline and a loss to tell it by."""
    cells = (cell for cell, base in frame.base.items() if base != cell and cell in frame.known)
    return {
        cell: judge(curves_of(frame, cell), curves_of(frame, frame.base[cell]))
        for cell in cells
        if any(curve_of(run) for run in frame.runs_of(cell, "ok"))
    }


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


# columns


def _follows(frame: Frame) -> dict[int, Cell]:
    """1 where a row follows, 0 where it does not, nan where nobody knows; and the same in words."""
    cells = {}
    for cell in frame.facts.index:
        if frame.base.get(cell) == cell:
            curves = curves_of(frame, cell)
            broken = [place for curve in curves.values() if (place := curve.broke_at) is not None]
            words = f"NO: not finite from step {min(broken)}" if broken else f"yardstick, {_count(len(curves), 'seed')}"
            cells[cell] = Cell(float(not broken), text=words)
    for cell, found in judgements(frame).items():
        cells[cell] = Cell(math.nan if found.follows is None else float(found.follows), text=found.words)
    return cells


def _tail_loss(frame: Frame) -> dict[int, Cell]:
    curves = {cell: [c for run in frame.runs_of(cell, "ok") if (c := curve_of(run))] for cell in frame.ok_cells}
    return {cell: Cell(float(np.mean([c.tail_loss for c in found]))) for cell, found in curves.items() if found}


_Read = Callable[[Frame], Mapping[int, Cell]]


def _of_difference(name: str, figure: str, of: Callable[[float], float] = float) -> _Read:
    """The value or the limit of a difference: of the loss in nat, of the gradient norm as a fraction."""

    def read(frame: Frame) -> dict[int, Cell]:
        found = [(c, getattr(d, figure)) for c, j in judgements(frame).items() for d in j.differences if d.name == name]
        return {cell: Cell(of(value)) for cell, value in found if value is not None}

    return read


def _to_loss(per_step: str, text: Callable[[float], str]) -> _Read:
    """Time or energy of every step up to the loss of the baseline's run of the same seed, mean over seeds; infinite
    where one never came there. Steps before the window, the first with its compiling among them, count as much as the
    window's."""

    def read(frame: Frame) -> dict[int, Cell]:
        costs, cells = frame.numbers(per_step).groupby(level=0).mean(), {}
        for cell, base in frame.base.items():
            own, other = curves_of(frame, cell), curves_of(frame, base)
            length = {seed: min(len(own[seed]), len(other[seed])) for seed in own if seed in other}
            steps = [steps_to_loss(own[seed].first(n), other[seed].first(n)) for seed, n in length.items()]
            if steps and cell in costs.index:
                value = float(np.mean(steps) * costs[cell])
                cells[cell] = Cell(value, text="never" if math.isinf(value) else text(value))
        return cells

    return read


def _change(logarithm: float) -> float:
    return ratio(logarithm) - 1


def _signed_percent(fraction: float) -> str:
    return f"{fraction * 100:+,.0f}" if abs(fraction) >= 0.1 else units.signed(fraction * 100)


def _kilojoules(joules: float) -> str:
    return f"{joules * 1e-3:.3g}"


_NAT, _NORM = Unit("nat", 1.0, "{:.4f}".format), "gradient norm"
COLUMNS: tuple[Column, ...] = tuple(
    Column(name, title, read, unit, None, in_words=name == "trains_alike", reads_steps=True)
    for name, title, read, unit in (
        ("trains_alike", f"trains like {BASELINE}", _follows, Unit("", 1.0, units.plain)),
        ("tail_loss", "loss, last quarter", _tail_loss, _NAT),
        (
            "tail_loss_difference", f"loss - {BASELINE}", _of_difference("loss", "value"),
            Unit("nat", 1.0, units.signed),
        ),
        ("tail_loss_limit", "limit", _of_difference("loss", "limit"), Unit("± nat", 1.0, "{:.2g}".format)),
        (
            "tail_gradient_norm_difference_fraction", f"gradient norm over {BASELINE}",
            _of_difference(_NORM, "value", _change), Unit("%", 100.0, _signed_percent),
        ),
        (
            "tail_gradient_norm_limit_fraction", "limit", _of_difference(_NORM, "limit", _change),
            Unit("± %", 100.0, lambda value: f"{value * 100:.2g}"),
        ),
        ("time_to_loss_s", "time to the same loss", _to_loss("phases.step.mean_s", units.seconds), SECONDS),
        (
            "energy_to_loss_j", "energy to the same loss",
            _to_loss("phases.step.mean_s * device_state.mean_power_w", _kilojoules), Unit("kJ", 1e-3, _kilojoules),
        ),
    )
)  # fmt: skip


def _notes(frame: Frame, cell: int) -> list[str]:
    """Several runs of one seed tell nothing more of how it trains; of several seeds the mean is no row's to subtract
    from."""
    seeds = len(curves_of(frame, cell))
    more = sum(curve_of(run) is not None for run in frame.runs_of(cell, "ok")) - seeds
    notes = [f"{_count(more, 'run')} of a seed that another one has: their loss is not looked at"] if more > 0 else []
    if seeds > 1:
        notes.append(f"its loss is the mean of {seeds} seeds; a difference is that to the run of the same seed")
    return notes


# the answer


def headline(frame: Frame) -> list[str]:
    """What to take and what not to take, with how much faster each is; the broken ones first."""
    names, found = frame.differing(), judgements(frame)
    baseline = frame.base_name
    times = STEP.numbers(frame).groupby(level=0).mean()
    titles = (
        f"Does not train like {baseline}, whatever its speed", "Did not end", "Not decided, more seeds tell",
        "Not judged", f"Trains like {baseline}",
    )  # fmt: skip
    lines: dict[str, list[str]] = {title: [] for title in titles}
    for cell in frame.facts.index:
        judgement, words, speed = found.get(cell), "", ""
        if judgement is not None:
            place = {False: 0, True: 4, None: 3 if judgement.reason else 2}[judgement.follows]
            words, base = judgement.why, frame.base[cell]
            speed = TIMES.text(times[base] / times[cell]) if cell in times.index and base in times.index else ""
        elif cell not in frame.ok_cells:
            place, words = 1, frame.label(cell)
        else:
            continue
        told = "; ".join(filter(None, [speed, words]))
        lines[titles[place]].append(frame.in_short(cell, names) + (f" ({told})" if told else ""))
    answers = [f"{title}: {', '.join(rows)}." for title, rows in lines.items() if rows]
    if seeds := max((judgement.seeds for judgement in found.values()), default=0):
        answers.append(
            f"Measured by {_count(seeds, 'seed')} of {baseline}: the limit is how far two of its runs may lie apart "
            "that began from different weights (95 %)."
        )
    return answers


# the picture


def _curves(_spec: ChartSpec, frame: Frame, _column_of: ColumnOf) -> Chart | None:
    """The smoothed loss of each row minus the baseline's of the same seed, over the band of the baseline's seeds about
    their mean."""
    cells = [cell for cell in frame.ordered(frame.differing()) if frame.base.get(cell, cell) != cell]
    bases = {frame.base[cell] for cell in cells}
    if len(bases) != 1:
        return None
    names, base = frame.differing(), curves_of(frame, bases.pop())
    looks = series_looks(names, [frame.known[cell] for cell in cells])
    width = share(min(map(len, base.values()), default=1), SMOOTHED_FRACTION)
    series = []
    for cell, look in list(zip(cells, looks, strict=True))[:MAX_SERIES]:
        label, curves = frame.in_short(cell, names), curves_of(frame, cell)
        for seed in [seed for seed in curves if seed in base][:1]:
            own, other = (curve.smoothed(width) for curve in (curves[seed], base[seed]))
            length, broke_at = min(len(own), len(other)), curves[seed].broke_at
            points: list[Spec] = [
                {"x": step, "y": value, "tip": f"{label}, step {step}: {value:+.4g} nat"}
                for step, value in _thinned(own[:length] - other[:length])
            ]
            if broke_at is not None:
                tip = f"{label}: not finite at step {broke_at}"
                points.append({"x": broke_at, "outcome": "non-finite", "tip": tip})
            series.append(Series(label, points, *look))
    if not series:
        return None
    layers, y = list[Spec](), Spec(title="loss difference (nat)")
    caption = f"Loss minus that of {frame.base_name}, same seed, mean of {width} steps."
    if len(base) > 1:
        steps = min(map(len, base.values()))
        values = np.array([curve.smoothed(width)[:steps] for curve in base.values()])
        lows, highs = (_thinned(end(values - values.mean(axis=0), axis=0)) for end in (np.min, np.max))
        band = [{"x": x, "low": low, "high": high} for (x, low), (_, high) in zip(lows, highs, strict=True)]
        # What runs away leaves the axis, which ends at some times the band.
        most = _BANDS * max((high - low for (_, low), (_, high) in zip(lows, highs, strict=True)), default=0.0)
        if any(abs(point.get("y", 0.0)) > most > 0 for each in series for point in each.points):
            y["scale"] = {"domain": [-most, most], "clamp": True}
        encoding = {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}
        layers = [{"data": {"values": band}, "mark": {"type": "area", "opacity": 0.25}, "encoding": encoding}]
        caption += f" Shaded: {len(base)} seeds of {frame.base_name} about their mean."
    caption += f" {len(cells) - MAX_SERIES} more rows are not drawn." if len(cells) > MAX_SERIES else ""
    return Chart("", line_chart(series, {"title": "step"}, y, has_points=False, layers=layers), caption)


def _thinned(values: np.ndarray[Any, Any]) -> list[tuple[int, float]]:
    """Places and finite values, at most as many as are seen."""
    places = np.flatnonzero(np.isfinite(values))
    return [(int(place), float(values[place])) for place in places[:: math.ceil(len(places) / _MAX_POINTS) or 1]]


CONVERGENCE = Feature(
    columns=COLUMNS,
    chart_kinds={"curves": ChartKind(_curves, by_baseline=True, spans=("loss_difference",))},
    row_notes=_notes,
    headline=headline,
)
