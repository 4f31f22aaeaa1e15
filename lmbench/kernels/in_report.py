"""What kernels add to a report: columns of profiled runs, charts of kernel time, notes, and timelines on its page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence

from lmbench.kernels.kinds import KINDS
from lmbench.kernels.parts import PARTS
from lmbench.records.instruments import AttentionTimes, KernelSummary, PhaseKernels, TopOperator
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import Span
from lmbench.report import units
from lmbench.report.cells import Cell, Pairing
from lmbench.report.charts import MAX_BARS, Chart, ChartKind, ColumnOf, Point, Series, rows_of
from lmbench.report.columns import Column, Measure, Number, Reader, numbers, over_runs
from lmbench.report.feature import Feature, PagePart
from lmbench.report.palette import FUSED, MUTED, part_colour
from lmbench.report.palette import KINDS as KIND_COLOURS
from lmbench.report.text import KERNEL_WIDTH, shortened
from lmbench.report.units import COUNT, MS, PERCENT, Unit
from lmbench.report.view import ChartSpec

#: What shares are of; `step` is the whole of any mode, `forward` also that of inference.
SHARED_SPANS: tuple[Span, ...] = ("forward", "backward", "step")
#: The parts of attention written out, in their order.
_INSIDE: Mapping[str, Callable[[AttentionTimes], float | None]] = {
    "scores": lambda times: times.scores_s,
    "mask": lambda times: times.mask_s,
    "softmax": lambda times: times.softmax_s,
    "values": lambda times: times.values_s,
}

# columns

#: Operators that are named of each phase.
_NAMED = 3


def of_kernels(read: Callable[[KernelSummary], float | None]) -> Number:
    """A number of a run's kernels."""
    return lambda run: None if run.kernels is None else read(run.kernels)


def of_phase(span: Span, read: Callable[[PhaseKernels], float | None]) -> Number:
    """A number of the kernels of a phase, or of the step."""

    def of_run(run: RunRecord) -> float | None:
        found = None if run.kernels is None else run.kernels.phases.get(span)
        return None if found is None else read(found)

    return of_run


def of_attention(span: Span, read: Callable[[AttentionTimes], float | None]) -> Number:
    """A number of attention written out, of forward or backward."""

    def of_run(run: RunRecord) -> float | None:
        found = None if run.kernels is None else run.kernels.attention.get(span)
        return None if found is None else read(found)

    return of_run


def times_by(cell: Cell, span: Span, axis: str) -> dict[str, float]:
    """Kernel time by kind or part of a phase, per step and averaged over runs, in s; what is fused is `several`."""
    sums: dict[str, list[float]] = {}
    for sample in cell.ok:
        found = None if sample.record.kernels is None else sample.record.kernels.phases.get(span)
        if found is None:
            continue
        own: dict[str, float] = {}
        for field, seconds in (found.kinds if axis == "kind" else found.parts).items():
            name = field.removesuffix("_s")
            key = FUSED if "+" in name else name
            own[key] = own.get(key, 0.0) + seconds
        for name, seconds in own.items():
            sums.setdefault(name, []).append(seconds)
    runs = len(numbers(cell, of_phase(span, lambda phase: phase.kernel_s)))
    return {name: math.fsum(values) / runs for name, values in sums.items()} if runs else {}


def no_kernels(cell: Cell) -> list[str]:
    """Why runs of a cell have no kernels to show, each reason once."""
    profiled = [sample.record.kernels for sample in cell.ok if sample.record.is_profiled]
    return list(dict.fromkeys(found.reason for found in profiled if found is not None and found.reason))


def _kernel_count(cell: Cell, _baseline: Cell | None) -> Measure | None:
    """Kernels per step; 0 of a run that has none, and no operators either."""
    found = over_runs(of_phase("step", lambda step: step.kernel_count))(cell, None)
    return Measure(0.0) if found is None and no_kernels(cell) and not _operators(cell) else found


def _operators(cell: Cell) -> list[TopOperator]:
    """The operators of the cell's first run that has any instead of kernels."""
    known = (sample.record.kernels.operators for sample in cell.ok if sample.record.kernels is not None)
    return next(filter(None, known), [])


def _top_operators(span: Span) -> Column:
    """A phase's longest operators on the host, of runs without kernels; the number is the first one's share."""

    def read(cell: Cell, _baseline: Cell | None) -> Measure | None:
        rows = [row for row in _operators(cell) if row.phase == span][:_NAMED]
        told = ", ".join(f"{shortened(row.name, KERNEL_WIDTH)} {units.percent(row.share_fraction)}" for row in rows)
        return Measure(rows[0].share_fraction, name=told) if rows else None

    plain = Unit("", 100.0, units.percent_number)
    return _profiled(f"{span}_top_operator_fraction", span, read, plain, text=lambda measure: measure.name)


def _matmul(span: Span, is_shown: Callable[[str], bool] = lambda mode: True) -> Reader:
    """Share of matrix products in a phase, of cells of these modes."""
    read = over_runs(of_phase(span, lambda phase: phase.matmul_fraction))
    return lambda cell, _: read(cell, None) if is_shown(str(cell.facts.get("mode"))) else None


def _share(span: Span, axis: str, name: str) -> Reader:
    def read(cell: Cell, _baseline: Cell | None) -> Measure | None:
        times = times_by(cell, span, axis)
        total = math.fsum(times.values())
        return Measure(times[name] / total) if total and name in times else None

    return read


def _top_other(cell: Cell, _baseline: Cell | None) -> Measure | None:
    """The longest kernel of the step that is no matrix product, of the first run that has one."""
    for sample in cell.ok:
        step = None if sample.record.kernels is None else sample.record.kernels.phases.step
        if step is not None and step.top_other is not None:
            return Measure(step.top_other.share_fraction, name=shortened(step.top_other.name, KERNEL_WIDTH))
    return None


def _host_wait(cell: Cell, _baseline: Cell | None) -> Measure | None:
    """Share of the step's time on the device in which it waits for the host, slowed by the profiler."""
    return _share_of_window(cell, lambda phase: phase.host_wait_s)


def _idle(cell: Cell, _baseline: Cell | None) -> Measure | None:
    """Share of the step's time on the device in which nothing runs, slowed by the profiler."""
    return _share_of_window(
        cell, lambda phase: None if phase.busy_s is None or phase.window_s is None else phase.window_s - phase.busy_s
    )


def _share_of_window(cell: Cell, read: Callable[[PhaseKernels], float | None]) -> Measure | None:
    shares = []
    for sample in cell.ok:
        found = [] if sample.record.kernels is None else list(sample.record.kernels.phases.items())
        phases = [phase for span, phase in found if span != "step"]
        windows = math.fsum(phase.window_s for phase in phases if phase.window_s is not None)
        if windows:
            shares.append(math.fsum(time for phase in phases if (time := read(phase)) is not None) / windows)
    return Measure(statistics.fmean(shares)) if shares else None


def _profiled(
    name: str, title: str, read: Reader, unit: Unit = PERCENT, text: Callable[[Measure], str] | None = None
) -> Column:
    return Column(name, title, read, unit, text, is_profiled=True)


def _kernel_time(span: Span) -> Reader:
    return over_runs(of_phase(span, lambda phase: phase.kernel_s))


def _ratio(decimals: int) -> Unit:
    return Unit("", 1.0, lambda value: f"{value:.{decimals}f}")


def _beside(span: Span) -> Column:
    """How long the device was busy with a phase, from profiled runs beside a cell's timing runs: about what its span
    would be if the device never waited."""

    def read(cell: Cell, _baseline: Cell | None) -> Measure | None:
        found = [sample.record.kernels for sample in (*cell.samples, *cell.passes) if sample.outcome == "ok"]
        phases = [kernels.phases.get(span) for kernels in found if kernels is not None]
        times = [phase.busy_s or phase.kernel_s for phase in phases if phase is not None]
        known = [time for time in times if time]
        return Measure(statistics.fmean(known)) if known else None

    return Column(f"{span}_busy_s", f"{span}, device busy", read, MS)


_GENERAL: tuple[Column, ...] = (
    _profiled(
        "kernel_count", "kernels", _kernel_count, COUNT,
        text=lambda measure: units.whole(measure.value) if measure.value else "none",
    ),
    _profiled("kernel_s", "kernel time", _kernel_time("step"), MS),
    _profiled(
        "inference_matmul_fraction", "matmul, inference", _matmul("forward", lambda mode: mode == "inference")
    ),
    _profiled("forward_matmul_fraction", "matmul, forward", _matmul("forward", lambda mode: mode != "inference")),
    _profiled("backward_matmul_fraction", "matmul, backward", _matmul("backward")),
    _profiled("step_matmul_fraction", "matmul, step", _matmul("step", lambda mode: mode == "train_step")),
    _profiled(
        "top_other_fraction", "top kernel but matmul", _top_other, Unit("", 100.0, units.percent_number),
        text=lambda measure: f"{measure.name} {units.percent(measure.value)}",
    ),
    _profiled("trace_host_wait_fraction", "waits for host", _host_wait),
    _profiled("trace_idle_fraction", "device idle", _idle),
    _profiled(
        "unclassified_part_fraction", "no part", over_runs(of_kernels(lambda found: found.unclassified_part_fraction))
    ),
    *(_profiled(f"{span}_kernel_s", span, _kernel_time(span), MS) for span in ("forward", "backward", "optimizer")),
    *(_top_operators(span) for span in ("forward", "backward", "optimizer")),
)  # fmt: skip

_SHARES: tuple[Column, ...] = tuple(
    _profiled(f"{span}_{name}_{axis}_fraction", "several, fused" if name == FUSED else name, _share(span, axis, name))
    for span in SHARED_SPANS
    for axis, names in (("kind", KINDS), ("part", (*PARTS, FUSED)))
    for name in names
)


def _attention_columns(span: Span) -> list[Column]:
    parts = {**_INSIDE, "matmul": lambda times: times.matmul_s}
    times = [
        _profiled(f"{span}_{part}_s", part, over_runs(of_attention(span, read)), MS) for part, read in parts.items()
    ]
    return [
        *times,
        _profiled(
            f"{span}_softmax_matmul_time_ratio", "softmax / matmul, time",
            over_runs(of_attention(span, lambda times: times.softmax_matmul_time_ratio)), _ratio(2),
        ),
        _profiled(
            f"{span}_softmax_matmul_flop_ratio", "softmax / matmul, FLOPs",
            over_runs(of_attention(span, lambda times: times.softmax_matmul_flop_ratio)), _ratio(4),
        ),
    ]  # fmt: skip


# charts

_ORDER: Mapping[str, Sequence[str]] = {"parts": (*PARTS, FUSED), "kinds": KINDS, "attention": tuple(_INSIDE)}
_PLACE = {name: place for place, name in enumerate((*PARTS, FUSED, *KINDS))}
#: More series than this nobody tells apart; all others are the rest.
_SHOWN = 7
REST = "rest"


def _chart(spec: ChartSpec, cells: Sequence[Cell], _pairing: Pairing, _column_of: ColumnOf) -> Chart | None:
    """Kernel time of a phase by part, by kind, or inside attention: a lying bar for each cell that has this phase."""
    kind, span = spec.kind, next(span for span in SHARED_SPANS if span == spec.y)
    rows = [(label, cell) for label, cell in rows_of(cells) if cell.ok]
    known = [(label, cell, times) for label, cell in rows if (times := _times(kind, span, cell))]
    if len(rows) > MAX_BARS or not known:
        return None
    # The same names in the charts of all phases: what is longest in the step, in the model's order.
    names = _longest(kind, [_times(kind, "step", cell) or times for _, cell, times in known])
    totals = [sum(times.values()) for _, _, times in known]
    places = [f"{row[0]}, {total * 1e3:,.3g}\N{NO-BREAK SPACE}ms" for row, total in zip(known, totals, strict=True)]
    series = []
    for name in [*names, REST]:
        points = []
        for (label, _, times), total, place in zip(known, totals, places, strict=True):
            seconds = sum(_others(times, names).values()) if name == REST else times.get(name, 0.0)
            share = 100 * seconds / total if total else 0.0
            points.append(Point(place, share, tip=f"{label}: {name} {units.milliseconds(seconds)} ms, {share:.1f} %"))
        if any(point.y for point in points):
            series.append(Series(name, points, _colour(kind, name)))
    caption = f"Share of the kernel time of {_whole(kind, span)}, with that time per step."
    if series and series[-1].label == REST:
        others = {name for _, _, times in known for name in _others(times, names)}
        caption += f" Rest: {', '.join(sorted(others, key=lambda name: _PLACE.get(name, 99)))}."
    return Chart("phases", "", "share (%)", series, caption=caption, categories=places)


def _colour(kind: str, name: str) -> int:
    return KIND_COLOURS.get(name, MUTED) if kind == "kinds" else part_colour(name)


def _whole(kind: str, span: Span) -> str:
    whole = "the step" if span == "step" else span
    return f"scores, mask, softmax and values in {whole}" if kind == "attention" else whole


def _times(kind: str, span: Span, cell: Cell) -> Mapping[str, float]:
    if kind != "attention":
        return times_by(cell, span, kind.removesuffix("s"))
    found = {part: numbers(cell, of_attention(span, read)) for part, read in _INSIDE.items()}
    return {part: statistics.fmean(values) for part, values in found.items() if values}


def _longest(kind: str, times: Sequence[Mapping[str, float]]) -> list[str]:
    """Names with the largest share of any cell, in their usual order."""
    shares: dict[str, float] = {}
    for own in times:
        total = sum(own.values())
        for name, seconds in own.items():
            shares[name] = max(shares.get(name, 0.0), seconds / total if total else 0.0)
    longest = sorted(shares, key=lambda name: (-shares[name], name))[:_SHOWN]
    return [name for name in _ORDER[kind] if name in longest]


def _others(times: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    return {name: seconds for name, seconds in times.items() if name not in names}


def _timelines() -> PagePart:
    # Reading a timeline takes numpy, which tables do without.
    from lmbench.kernels.step_picture import Timelines

    return Timelines()


KERNELS = Feature(
    columns=(
        _beside("forward"),
        _beside("backward"),
        *_GENERAL,
        *_SHARES,
        *_attention_columns("forward"),
        *_attention_columns("backward"),
    ),
    chart_kinds={
        kind: ChartKind(_chart, has_rows=True, spans=spans)
        for kind, spans in {"parts": SHARED_SPANS, "kinds": SHARED_SPANS, "attention": ("forward", "backward")}.items()
    },
    row_notes=no_kernels,
    page_part=_timelines,
)
