"""Charts of profiled runs: kernel time of a phase by part, by kind, or inside attention, on top of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmbench.kernels.shown.columns import FUSED, times_by
from lmbench.kernels.trace.kinds import KINDS
from lmbench.kernels.trace.parts import PARTS
from lmbench.kernels.trace.shares import ATTENTION_PARTS
from lmbench.report.cells import Cell
from lmbench.report.chart import Chart, Point, Series
from lmbench.report.colours import KIND_COLOURS, MUTED, part_colour
from lmbench.report.columns import numbers
from lmbench.report.units import milliseconds

_ORDER = {"parts": (*PARTS, FUSED), "kinds": KINDS, "attention": ATTENTION_PARTS}
#: More series than this nobody tells apart; all others are the rest.
_SHOWN = 7
REST = "rest"


def kernel_chart(kind: str, phase: str, cells: Sequence[Cell], labels: Sequence[str]) -> Chart | None:
    """A lying bar for each cell that has this phase; None if none has.

    Args:
        kind: `parts`, `kinds` or `attention`.
        phase: a phase or `step`.
        labels: the cells in words.
    """
    times = [_times(kind, phase, cell) for cell in cells]
    known = [index for index, own in enumerate(times) if own]
    if not known:
        return None
    # The same names in the charts of all phases: what is longest in the step, in the model's order.
    names = _longest(kind, [_times(kind, "step", cells[index]) or times[index] for index in known])
    totals = {index: sum(times[index].values()) for index in known}
    rows = {index: f"{labels[index]}, {totals[index] * 1e3:,.3g}\N{NO-BREAK SPACE}ms" for index in known}
    series = []
    for name in [*names, REST]:
        points = []
        for index in known:
            seconds = _rest(times[index], names) if name == REST else times[index].get(name, 0.0)
            share = 100 * seconds / totals[index] if totals[index] else 0.0
            tip = f"{labels[index]}: {name} {milliseconds(seconds)} ms, {share:.1f} %"
            points.append(Point(rows[index], share, tip=tip))
        if any(point.y for point in points):
            series.append(Series(name, points, _colour(kind, name)))
    caption = f"Share of the kernel time of {_whole(kind, phase)}, with that time per step."
    if series and series[-1].label == REST:
        caption += f" Rest: {', '.join(_others(times, names))}."
    return Chart("phases", "", "share (%)", series, caption=caption, categories=list(rows.values()))


def _colour(kind: str, name: str) -> int:
    return KIND_COLOURS.get(name, MUTED) if kind == "kinds" else part_colour(name)


def _whole(kind: str, phase: str) -> str:
    whole = "the step" if phase == "step" else phase
    return f"scores, mask, softmax and values in {whole}" if kind == "attention" else whole


def _times(kind: str, phase: str, cell: Cell) -> Mapping[str, float]:
    if kind != "attention":
        return times_by(cell, phase, kind.removesuffix("s"))
    found = {}
    for part in ATTENTION_PARTS:
        if values := numbers(cell, f"kernels.attention.{phase}.{part}_s"):
            found[part] = sum(values) / len(values)
    return found


def _longest(kind: str, times: Sequence[Mapping[str, float]]) -> list[str]:
    """Names with the largest share of any cell, in their usual order."""
    shares: dict[str, float] = {}
    for own in times:
        total = sum(own.values())
        for name, seconds in own.items():
            shares[name] = max(shares.get(name, 0.0), seconds / total if total else 0.0)
    longest = sorted(shares, key=lambda name: (-shares[name], name))[:_SHOWN]
    return [name for name in _ORDER[kind] if name in longest]


def _rest(times: Mapping[str, float], names: Sequence[str]) -> float:
    return sum(seconds for name, seconds in times.items() if name not in names)


def _others(times: Sequence[Mapping[str, float]], names: Sequence[str]) -> list[str]:
    order = {name: place for place, name in enumerate((*PARTS, FUSED, *KINDS))}
    return sorted({name for own in times for name in own if name not in names}, key=lambda name: order.get(name, 99))
