"""What convergence adds to a report: columns of how a row trains against its baseline, curves, and the answer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from lmbench.convergence.curve import SMOOTHED_FRACTION, Curve, crossing, curve_of, share, smoothed
from lmbench.convergence.judgement import Difference, Judgement, by_seed, judge, pairs_of, ratio
from lmbench.report import units
from lmbench.report.cells import Cell, Pairing, differing, in_order, in_short
from lmbench.report.charts import Chart, ChartKind, ColumnOf, Point, Series
from lmbench.report.columns import BASELINE, Column, Measure, Reader, mean_of, numbers
from lmbench.report.feature import Feature
from lmbench.report.gather import Sample
from lmbench.report.palette import SeriesColours
from lmbench.report.units import SECONDS, TIMES, Unit
from lmbench.report.view import ChartSpec

#: Where in its run the baseline has the loss that others are to reach: the rest of the steps is theirs to catch up.
TARGET_FRACTION = 0.75
#: Points of a curve on a page, and curves in a chart: more are not seen.
_MAX_POINTS, _MAX_CURVES = 300, 16

_NAT = Unit("nat", 1.0, "{:.4f}".format)


# columns


def _tail_loss(cell: Cell, _baseline: Cell | None) -> Measure | None:
    losses = [curve.tail_loss for sample in cell.ok if (curve := curve_of(sample)) is not None]
    return Measure(statistics.fmean(losses)) if losses else None


def _of_judgement(read: Callable[[Judgement], Difference | None]) -> Callable[[Cell, Cell | None], Difference | None]:
    def of_cell(cell: Cell, baseline: Cell | None) -> Difference | None:
        found = judge(cell, baseline)
        return None if found is None else read(found)

    return of_cell


def _value(read: Callable[[Judgement], Difference | None], of: Callable[[float], float] = float) -> Reader:
    def of_cell(cell: Cell, baseline: Cell | None) -> Measure | None:
        found = _of_judgement(read)(cell, baseline)
        return None if found is None else Measure(of(found.value))

    return of_cell


def _limit(read: Callable[[Judgement], Difference | None], of: Callable[[float], float] = float) -> Reader:
    def of_cell(cell: Cell, baseline: Cell | None) -> Measure | None:
        found = _of_judgement(read)(cell, baseline)
        return None if found is None or found.limit is None else Measure(of(found.limit))

    return of_cell


def _follows(cell: Cell, baseline: Cell | None) -> Measure | None:
    """1 where it follows, 0 where it does not, nan where nobody knows; in words as its name."""
    if cell is baseline:
        own = by_seed(cell.ok)
        broken = [place for curve in own.values() if (place := curve.broke_at) is not None]
        told = f"NO: not finite from step {min(broken)}" if broken else f"yardstick, {_count(len(own), 'seed')}"
        return Measure(float(not broken), name=told)
    found = judge(cell, baseline)
    if found is None:
        return None
    return Measure(math.nan if found.follows is None else float(found.follows), name=found.words)


def _steps_to_loss(cell: Cell, baseline: Cell | None) -> float | None:
    """Steps until the smoothed loss is what the baseline's was, of the same seed, after three quarters of its steps;
    mean over seeds, infinite where one never came there."""
    found = [] if baseline is None else pairs_of(cell, baseline)
    steps = [steps_to_loss(mine, theirs) for mine, theirs in found]
    if not steps:
        return None
    return math.inf if None in steps else statistics.fmean(each for each in steps if each is not None)


def steps_to_loss(curve: Curve, baseline: Curve) -> float | None:
    """Steps until a curve's smoothed loss crosses the target; None if it never does, or there is none.

    The target is the baseline's smoothed loss after three quarters of its steps. Both are smoothed alike, so that they
    are late alike; between two steps the crossing lies on a straight line.
    """
    width = share(len(baseline), SMOOTHED_FRACTION)
    target = smoothed(baseline.losses, width, baseline.skipped)[share(len(baseline), TARGET_FRACTION) - 1]
    place = crossing(smoothed(curve.losses, width, curve.skipped), target)
    return None if place is None else place + 1


def _to_loss(per_step: Callable[[Sample], float | None]) -> Reader:
    """Something of every step, up to the same loss. Steps before the window, the first with its compiling among them,
    count as much as the window's."""

    def of_cell(cell: Cell, baseline: Cell | None) -> Measure | None:
        steps = _steps_to_loss(cell, baseline)
        values = [value for sample in cell.ok if (value := per_step(sample)) is not None]
        return Measure(steps * statistics.fmean(values)) if steps is not None and values else None

    return of_cell


def _joules_per_step(sample: Sample) -> float | None:
    step_s, power_w = mean_of("step")(sample.record), sample.record.device_state.mean_power_w
    return None if step_s is None or power_w is None else step_s * power_w


def _never(text: Callable[[float], str]) -> Callable[[Measure], str]:
    return lambda measure: "never" if math.isinf(measure.value) else text(measure.value)


def _loss(found: Judgement) -> Difference | None:
    return found.loss


def _norm(found: Judgement) -> Difference | None:
    return found.norm


def _change(logarithm: float) -> float:
    return ratio(logarithm) - 1


def _signed_percent(fraction: float) -> str:
    return f"{fraction * 100:+,.0f}" if abs(fraction) >= 0.1 else units.signed(fraction * 100)


def _kilojoules(joules: float) -> str:
    return f"{joules * 1e-3:.3g}"


COLUMNS: tuple[Column, ...] = tuple(
    replace(column, reads_steps=True)
    for column in (
        Column("trains_alike", f"trains like {BASELINE}", _follows, Unit("", 1.0, units.plain), in_words=True),
        Column("tail_loss", "loss, last quarter", _tail_loss, _NAT),
        Column("tail_loss_difference", f"loss - {BASELINE}", _value(_loss), Unit("nat", 1.0, units.signed)),
        Column("tail_loss_limit", "limit", _limit(_loss), Unit("± nat", 1.0, "{:.2g}".format)),
        Column(
            "tail_gradient_norm_difference_fraction", f"gradient norm over {BASELINE}", _value(_norm, _change),
            Unit("%", 100.0, _signed_percent),
        ),
        Column(
            "tail_gradient_norm_limit_fraction", "limit", _limit(_norm, _change),
            Unit("± %", 100.0, lambda value: f"{value * 100:.2g}"),
        ),
        Column(
            "time_to_loss_s", "time to the same loss", _to_loss(lambda sample: mean_of("step")(sample.record)), SECONDS,
            _never(units.seconds),
        ),
        Column(
            "energy_to_loss_j", "energy to the same loss", _to_loss(_joules_per_step),
            Unit("kJ", 1e-3, _kilojoules), _never(_kilojoules),
        ),
    )
)  # fmt: skip


def _notes(cell: Cell) -> list[str]:
    """Several runs of one seed tell nothing more of how it trains; of several seeds the mean is no row's to subtract
    from."""
    own = by_seed(cell.ok)
    more = sum(curve_of(sample) is not None for sample in cell.ok) - len(own)
    told = [f"{_count(more, 'run')} of a seed that another one has: their loss is not looked at"] if more > 0 else []
    if len(own) > 1:
        told.append(f"its loss is the mean of {len(own)} seeds; a difference is that to the run of the same seed")
    return told


# the answer


def answer(cells: Sequence[Cell], pairing: Pairing) -> list[str]:
    """What to take and what not to take, with how much faster each is; the broken ones first."""
    names = differing(cells)
    found = [(cell, judgement) for cell in cells if (judgement := judge(cell, pairing.of(cell))) is not None]
    baseline = pairing.baseline.name if pairing.baseline else ""

    def line(cell: Cell, words: str) -> str:
        speed = _speedup(cell, pairing.of(cell))
        return in_short(cell, names) + (f" ({'; '.join(filter(None, [speed, words]))})" if speed or words else "")

    bad = [line(cell, judgement.why) for cell, judgement in found if judgement.follows is False]
    unknown = [(cell, judgement) for cell, judgement in found if judgement.follows is None]
    undecided = [line(cell, judgement.why) for cell, judgement in unknown if not judgement.reason]
    unjudged = [line(cell, judgement.reason) for cell, judgement in unknown if judgement.reason]
    good = [line(cell, "") for cell, judgement in found if judgement.follows]
    told = {
        f"Does not train like {baseline}, whatever its speed": bad,
        "Did not end": [line(cell, cell.label) for cell in cells if not cell.ok],
        "Not decided, more seeds tell": undecided,
        "Not judged": unjudged,
        f"Trains like {baseline}": good,
    }
    answers = [f"{what}: {', '.join(rows)}." for what, rows in told.items() if rows]
    if seeds := max((judgement.seeds for _, judgement in found), default=0):
        answers.append(
            f"Measured by {_count(seeds, 'seed')} of {baseline}: the limit is how far two of its runs may lie apart "
            "that began from different weights (95 %)."
        )
    return answers


def _speedup(cell: Cell, baseline: Cell | None) -> str:
    own, base = (numbers(each, mean_of("step")) if each else [] for each in (cell, baseline))
    return TIMES.text(statistics.fmean(base) / statistics.fmean(own)) if own and base else ""


# curves

#: What a curve is of: the axis, and what is said below the chart.
_QUANTITIES = {
    "loss": ("loss (nat)", "Loss"),
    "loss_difference": (
        "loss - {baseline} (nat)",
        "Loss minus that of {baseline} with the same seed and data; seeds minus their mean",
    ),
    "gradient_norm": ("gradient norm", "Gradient norm before clipping"),
}
#: Of these heights of the band a difference is drawn; further away it leaves the chart.
_BANDS = 6.0


def _curves(spec: ChartSpec, cells: Sequence[Cell], pairing: Pairing, _column_of: ColumnOf) -> Chart | None:
    """A line for each cell's first seed that the baseline has too, and the band between the lowest and the highest of
    the baseline's seeds."""
    name = pairing.baseline.name if pairing.baseline else ""
    y_label, what = (text.format(baseline=name) for text in _QUANTITIES[spec.y])
    series: list[Series] = []
    band: list[tuple[float, float, float]] = []
    width, seeds_count, left_out = 1, 0, 0
    names = differing(cells)
    colours = SeriesColours(names, [cell.facts for cell in cells])
    for cell in in_order(cells, names):
        baseline = pairing.of(cell)
        own, other = by_seed(cell.ok), by_seed(baseline.ok) if baseline else {}
        seeds = next((seeds for seeds in own if seeds in other), next(iter(own), None))
        if seeds is None:
            continue
        width = share(len(own[seeds]), SMOOTHED_FRACTION)
        if cell is baseline and len(own) > 1:
            seeds_count, band = len(own), _band([_values(curve, spec.y, width) for curve in own.values()], spec.y)
        values = _values(own[seeds], spec.y, width)
        label = in_short(cell, names)
        colour, is_compiled = colours.of(cell.facts)
        if spec.y == "loss_difference":
            if cell is baseline or seeds not in other:
                continue
            values = [mine - theirs for mine, theirs in zip(values, _values(other[seeds], spec.y, width), strict=False)]
        if len(series) == _MAX_CURVES:
            left_out += 1
            continue
        points = _points(values, label, own[seeds].broke_at)
        if points:
            series.append(Series(label, points, colour, is_dashed=is_compiled))
    if not series:
        return None
    span = _span(series, band, spec.y)
    outside = [each.label for each in series if _is_outside(each, *span)]
    caption = f"{what}, mean of {width} steps."
    caption += f" Beyond the axis: {', '.join(outside)}." if outside else ""
    caption += f" {left_out} more rows are not drawn." if left_out else ""
    return Chart(
        "curves", "step", y_label, series, caption=caption, band=band, band_label=f"{seeds_count} seeds of {name}",
        span=span,
    )  # fmt: skip


def _values(curve: Curve, quantity: str, width: int) -> list[float]:
    return smoothed(curve.norms if quantity == "gradient_norm" else curve.losses, width, curve.skipped)


def _band(curves: Sequence[Sequence[float]], quantity: str) -> list[tuple[float, float, float]]:
    """Step, lowest and highest of the seeds; of differences about their mean."""
    found = []
    for step, values in enumerate(zip(*curves, strict=False)):
        if all(map(math.isfinite, values)):
            middle = statistics.fmean(values) if quantity == "loss_difference" else 0.0
            found.append((float(step), min(values) - middle, max(values) - middle))
    return found[:: _stride(len(found))]


def _points(values: Sequence[float], label: str, broke_at: int | None) -> list[Point]:
    known = [(step, value) for step, value in enumerate(values) if math.isfinite(value)]
    points = [
        Point(float(step), value, tip=f"{label}, step {step}: {value:.4g}")
        for step, value in known[:: _stride(len(known))]
    ]
    if broke_at is not None:
        points.append(Point(float(broke_at), None, outcome="non-finite", tip=f"{label}: not finite at step {broke_at}"))
    return points


def _stride(count: int) -> int:
    return math.ceil(count / _MAX_POINTS) or 1


def _is_outside(series: Series, low: float, high: float) -> bool:
    known = [point.y for point in series.points if point.y is not None]
    return bool(known) and all(not low <= value <= high for value in known)


def _span(series: Sequence[Series], band: Sequence[tuple[float, float, float]], quantity: str) -> tuple[float, float]:
    """What the axis spans: all curves, but of those that run away only so much that the others can be told apart."""
    values = [point.y for each in series for point in each.points if point.y is not None]
    values += [end for _, low, high in band for end in (low, high)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if band and quantity == "loss_difference":
        most = _BANDS * max(abs(end) for _, *ends in band for end in ends)
        low, high = max(low, -most), min(high, most)
    elif band:
        top = max(end for _, _, end in band)
        high = min(high, top + 0.3 * (top - low))
    room = 0.05 * (high - low) or 0.5
    return low - room, high + room


CONVERGENCE = Feature(
    columns=COLUMNS,
    chart_kinds={"curves": ChartKind(_curves, by_baseline=True, spans=tuple(_QUANTITIES))},
    row_notes=_notes,
    answer=answer,
)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
