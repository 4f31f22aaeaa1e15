"""The convergence part of a report: columns on how a row trains against its baseline, a chart of loss differences, and
headlines on which rows train like the baseline."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache
from typing import Any

import numpy as np

from lmbench.convergence.judgement import (
    SMOOTHED_FRACTION,
    Curve,
    Judgement,
    curve_of,
    curves_of,
    judge,
    ratio,
    share,
    steps_to_loss,
)
from lmbench.records.vocabulary import Values
from lmbench.report.answer import Cell, Chart, listed
from lmbench.report.charts import MAX_SERIES, picture
from lmbench.report.columns import BASELINE, NAT, STEP, Quantity, Read
from lmbench.report.frame import Frame, MeasuredCell
from lmbench.report.units import LOSS, SECONDS, TIMES, WORDS, Unit, change_percent
from lmbench.report.view import ChartKind, ChartSpec, ColumnOf, Feature

#: The most points of a curve on a page: more of them cannot be seen.
_MAX_POINTS = 300
#: The axis of loss differences ends at this many times their limit.
_LIMITS = 10


@lru_cache(maxsize=4)
def judgements(frame: Frame) -> dict[MeasuredCell, Judgement]:
    """The judgement on each cell that has a baseline and a run with a loss."""
    return {
        cell: judge(curves_of(cell.by_seed), curves_of(base.by_seed))
        for cell, base in frame.compared
        if any(map(curve_of, cell.ok))
    }


# columns


def _follows(frame: Frame, cell: MeasuredCell) -> Cell | None:
    """1 if a row trains like its baseline, 0 if not, nan if undecided; the cell's text says the same in words."""
    judgement = judgements(frame).get(cell)
    if judgement is None:
        return None
    return Cell(math.nan if judgement.follows is None else float(judgement.follows), text=judgement.words)


def _tail_loss(_frame: Frame, cell: MeasuredCell) -> float | None:
    losses = [curve.tail_loss for run in cell.ok if (curve := curve_of(run))]
    return float(np.mean(losses)) if losses else None


def _of_difference(name: str, figure: str) -> Read:
    """Reads the value or the limit of a difference: of the loss in nat, of the gradient norm as a fraction."""

    def read(frame: Frame, cell: MeasuredCell) -> float | None:
        judgement = judgements(frame).get(cell)
        value = getattr(judgement.differences.get(name), figure, None) if judgement is not None else None
        return value if value is None or name == "loss" else ratio(value) - 1

    return read


def _time_to_loss(_frame: Frame, cell: MeasuredCell) -> Cell | None:
    """The time until a row reaches the target loss of the baseline's run of the same seed.

    The steps to that loss, averaged over seeds, times the mean step. Each step before the window, even the first with
    its compilation, counts as one such step. Infinite if any seed never reaches the loss.
    """
    steps_s, pairs = cell.numbers(STEP.expression), _pairs(cell)
    if not steps_s or not pairs:
        return None
    # Both curves of a pair are cut to the steps that both have.
    steps = [steps_to_loss(curve.first(len(other)), other.first(len(curve))) for curve, other in pairs]
    value = float(np.mean(steps) * np.mean(steps_s))
    return Cell(value, text="never" if math.isinf(value) else "")


def _pairs(cell: MeasuredCell) -> list[tuple[Curve, Curve]]:
    """The curves of a row, each with that of the baseline's run of the same seed."""
    if cell.base is None:
        return []
    curves, baseline = curves_of(cell.by_seed), curves_of(cell.base.by_seed)
    return [(curves[seed], baseline[seed]) for seed in curves if seed in baseline]


_NORM = "gradient norm"
COLUMNS = (
    Quantity("trains_alike", f"trains like {BASELINE}", _follows, WORDS, None),
    Quantity("tail_loss", "loss, last quarter", _tail_loss, LOSS, None),
    Quantity("tail_loss_difference", f"loss - {BASELINE}", _of_difference("loss", "value"), NAT, None),
    Quantity("tail_loss_limit", "limit", _of_difference("loss", "limit"), Unit("{:.2g}".format, "± nat"), None),
    Quantity(
        "tail_gradient_norm_difference_fraction", f"gradient norm over {BASELINE}",
        _of_difference(_NORM, "value"), Unit(change_percent, scale=100.0), None,
    ),
    Quantity(
        "tail_gradient_norm_limit_fraction", "limit", _of_difference(_NORM, "limit"),
        Unit(lambda value: f"{value * 100:.2g}", "± %", 100.0), None,
    ),
    Quantity("time_to_loss_s", "time to the same loss", _time_to_loss, SECONDS, None),
)  # fmt: skip


def headline(frame: Frame) -> list[str]:
    """One sentence for each kind of judgement, with its rows and their speed-up; rows that do not train come first."""
    names, judged, rows = frame.differing(), judgements(frame), defaultdict[Any, list[str]](list)
    times = {cell: figure.value for cell, figure in STEP.of(frame).items()}
    timed = [(cell, base) for cell, base in frame.compared if {cell, base} <= times.keys()]
    speeds = {cell: TIMES.text(times[base] / times[cell]) for cell, base in timed}
    for cell in frame.cells:
        row, judgement = cell.describe(names), judged.get(cell)
        if judgement is not None:
            words = listed(speeds.get(cell), judgement.why, separator="; ")
            rows[judgement.follows].append(f"{row} ({words})" if words else row)
        elif not cell.ok:
            rows["ended"].append(f"{row} ({cell.outcome})")
    titles = {
        False: f"Does not train like {frame.base_name}, whatever its speed",
        "ended": "Did not end",
        None: "Not decided",
        True: f"Trains like {frame.base_name}",
    }
    return [f"{title}: {', '.join(rows[key])}." for key, title in titles.items() if rows[key]]


def _seed_notes(cell: MeasuredCell) -> list[str]:
    """A note on a baseline of several seeds, whose mean differs from the seed that a row is compared with."""
    seeds = len(cell.by_seed) if cell.base == cell else 0
    return [f"the mean of {seeds} seeds; a difference is taken from the run of the same seed"] if seeds > 1 else []


# the picture


def _curves(_spec: ChartSpec, frame: Frame, _column_of: ColumnOf) -> Chart | None:
    """The smoothed loss of each row minus that of the baseline's run of the same seed. A shaded area shows the limit of
    the tail's difference."""
    names, points = frame.differing(), list[Values]()
    compared = frame.select(frame.ordered(names)).compared
    if len({base for _, base in compared}) != 1:
        return None
    baseline = curves_of(compared[0][1].by_seed)
    width = share(min(map(len, baseline.values()), default=1), SMOOTHED_FRACTION)
    for cell, _ in compared[:MAX_SERIES]:
        label, pairs = cell.describe(names), _pairs(cell)
        if not pairs:
            continue
        smoothed, reference = (curve.smoothed(width)[: min(map(len, pairs[0]))] for curve in pairs[0])
        differences = (smoothed - reference).tolist()
        finite = [(step, value) for step, value in enumerate(differences) if math.isfinite(value)]
        points += [
            {"series": label, "x": step, "y": value, "tip": f"{label}, step {step}: {value:+.4g} nat"}
            for step, value in finite[:: math.ceil(len(finite) / _MAX_POINTS) or 1]
        ]
    if not points:
        return None
    losses = [judgement.differences.get("loss") for judgement in judgements(frame).values()]
    limit = max((loss.limit for loss in losses if loss is not None and loss.limit is not None), default=0.0)
    borders = [{"x": step, "low": -limit, "high": limit} for step in (0, max(point["x"] for point in points))]
    area = {
        "data": {"values": borders},
        "mark": {"type": "area", "opacity": 0.25},
        "encoding": {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}},
    }
    # A curve that diverges is drawn at the end of the axis.
    scale = {"scale": {"domain": [-_LIMITS * limit, _LIMITS * limit], "clamp": True}} if limit else {}
    caption = (
        f"Loss minus that of {frame.base_name}, same seed, mean of {width} steps. Shaded: how far the mean of the last "
        "quarter may be off, by the spread of seeds."
    )
    y = {"title": "loss difference (nat)", **scale}
    return Chart("", picture("lines", points, [area], x={"title": "step"}, y=y), caption)


CONVERGENCE = Feature(
    columns=COLUMNS,
    chart_kinds={"curves": ChartKind(_curves, by_baseline=True)},
    row_notes=_seed_notes,
    headline=headline,
)
