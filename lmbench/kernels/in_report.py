"""What kernels add to a report: columns of profiled runs, charts of kernel time, and notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import pandas as pd

from lmbench.kernels.kinds import KINDS
from lmbench.kernels.parts import FUSED, PARTS
from lmbench.kernels.step_chart import step_chart
from lmbench.kernels.step_timeline import TIMELINE_FILE, read_timeline
from lmbench.records.instruments import PhaseKernels
from lmbench.records.load import Run
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
from lmbench.records.vocabulary import Span
from lmbench.report import units
from lmbench.report.answer import Cell, Chart
from lmbench.report.catalogue import Feature
from lmbench.report.charts import MAX_BARS, ChartKind, ColumnOf, rows_of, stacked_chart
from lmbench.report.columns import Column, per_cell
from lmbench.report.console import shortened
from lmbench.report.frame import Expression, Frame
from lmbench.report.timeline import page_charts
from lmbench.report.units import COUNT, MS, PERCENT, Unit
from lmbench.report.view import ChartSpec

#: What shares are of; `step` is the whole of any mode, `forward` also that of inference.
SHARED_SPANS: tuple[Span, ...] = ("forward", "backward", "step")
#: The parts of attention written out, in their order.
_INSIDE = ("scores", "mask", "softmax", "values")
#: Operators that are named of each phase, and the width of a kernel's name among other words.
_NAMED, _NAME_WIDTH = 3, 40
#: More series than this nobody tells apart; all others are the rest.
_SHOWN, REST = 7, "rest"
_ORDER: Mapping[str, Sequence[str]] = {"parts": (*PARTS, FUSED), "kinds": KINDS, "attention": _INSIDE}

# columns


def _profiled(name: str, title: str, field: Expression, unit: Unit = PERCENT, modes: Sequence[str] = ()) -> Column:
    return Column(name, title, field, unit, modes=modes, is_profiled=True)


def _first(name: str, title: str, read: Callable[[Run], Cell | None]) -> Column:
    """A column of words about a share, of the cell's first run that has it."""
    return Column(name, title, per_cell(read), Unit("", 100.0, units.percent_number), None, is_profiled=True)


def _times(run: RunRecord, kind: str, span: str) -> dict[str, float]:
    """Kernel time of a phase by kind, by part or inside attention, in s per step; what is fused is `several`."""
    if kind == "attention":
        inside = {name: value_at(run, f"kernels.attention.{span}.{name}_s") for name in _INSIDE}
        return {name: seconds for name, seconds in inside.items() if seconds is not None}
    times: dict[str, float] = {}
    for field, seconds in (value_at(run, f"kernels.phases.{span}.{kind}") or {}).items():
        name = FUSED if "+" in field else field.removesuffix("_s")
        times[name] = times.get(name, 0.0) + seconds
    return times


def _share(kind: str, span: Span, name: str) -> Expression:
    def of(run: RunRecord) -> float | None:
        times = _times(run, kind, span)
        return times[name] / total if name in times and (total := math.fsum(times.values())) else None

    return of


def _share_of_window(read: Callable[[PhaseKernels], float | None]) -> Expression:
    """Share of the step's time on the device, slowed by the profiler."""

    def of(run: RunRecord) -> float | None:
        phases = [] if run.kernels is None else [phase for span, phase in run.kernels.phases.items() if span != "step"]
        window_s = math.fsum(phase.window_s or 0.0 for phase in phases)
        return math.fsum(read(phase) or 0.0 for phase in phases) / window_s if window_s else None

    return of


def _idle_s(phase: PhaseKernels) -> float | None:
    return None if phase.busy_s is None or phase.window_s is None else phase.window_s - phase.busy_s


def _kernel_count(run: Run) -> Cell | None:
    """Kernels per step; `none` of a run that has no kernels, and no operators either."""
    count, kernels = value_at(run.record, "kernels.phases.step.kernel_count"), run.record.kernels
    if count is not None:
        return Cell(count)
    return Cell(0, text="none") if kernels is not None and kernels.reason and not kernels.operators else None


def _in_words(rows: Sequence[Any]) -> Cell | None:
    """Names with their shares; the number is the first one's."""
    text = ", ".join(f"{shortened(row.name, _NAME_WIDTH)} {units.percent(row.share_fraction)}" for row in rows)
    return Cell(rows[0].share_fraction, text=text) if rows else None


def _top_other(run: Run) -> Cell | None:
    """The longest kernel of the step that is no matrix product."""
    top = value_at(run.record, "kernels.phases.step.top_other")
    return _in_words([] if top is None else [top])


def _top_operators(span: Span) -> Callable[[Run], Cell | None]:
    """A phase's longest operators on the host, of a run without kernels."""

    def of(run: Run) -> Cell | None:
        operators = value_at(run.record, "kernels.operators") or ()
        return _in_words([row for row in operators if row.phase == span][:_NAMED])

    return of


def _busy(span: Span) -> Callable[[Frame], Mapping[int, Cell]]:
    """How long the device was busy with a phase, from profiled runs beside a cell's timing runs: about what its span
    would be if the device never waited."""

    def seconds(run: RunRecord) -> Any:
        return value_at(run, f"kernels.phases.{span}.busy_s") or value_at(run, f"kernels.phases.{span}.kernel_s")

    def of(frame: Frame) -> dict[int, Cell]:
        means = frame.shows(is_profiled=True).numbers(seconds).groupby(level=0).mean()
        return {cell: Cell(value) for cell, value in means.to_dict().items() if value}

    return of


def _columns(span: Span) -> Iterator[Column]:
    """Columns of a phase: its kernels, and what is inside attention written out."""
    yield Column(f"{span}_busy_s", f"{span}, device busy", _busy(span), MS, None)
    attention = f"kernels.attention.{span}"
    for name in (*_INSIDE, "matmul"):
        yield _profiled(f"{span}_{name}_s", name, f"{attention}.{name}_s", MS)
    for name, title, digits in (("time", "time", "{:.2f}"), ("flop", "FLOPs", "{:.4f}")):
        field = f"softmax_matmul_{name}_ratio"
        unit = Unit("", 1.0, digits.format)
        yield _profiled(f"{span}_{field}", f"softmax / matmul, {title}", f"{attention}.{field}", unit)


_TRAINING = ("forward", "forward_backward", "train_step")
_PHASES: tuple[Span, ...] = ("forward", "backward", "optimizer")
COLUMNS: tuple[Column, ...] = (
    Column("kernel_count", "kernels", per_cell(_kernel_count), COUNT, None, is_profiled=True),
    _profiled("kernel_s", "kernel time", "kernels.phases.step.kernel_s", MS),
    *(
        _profiled(f"{name}_matmul_fraction", f"matmul, {name}", f"kernels.phases.{span}.matmul_fraction", modes=modes)
        for name, span, modes in (
            ("inference", "forward", ("inference",)),
            ("forward", "forward", _TRAINING),
            ("backward", "backward", ()),
            ("step", "step", ("train_step",)),
        )
    ),
    _first("top_other_fraction", "top kernel but matmul", _top_other),
    _profiled("trace_host_wait_fraction", "waits for host", _share_of_window(attrgetter("host_wait_s"))),
    _profiled("trace_idle_fraction", "device idle", _share_of_window(_idle_s)),
    _profiled("unclassified_part_fraction", "no part", "kernels.unclassified_part_fraction"),
    *(_profiled(f"{span}_kernel_s", span, f"kernels.phases.{span}.kernel_s", MS) for span in _PHASES),
    *(_first(f"{span}_top_operator_fraction", span, _top_operators(span)) for span in _PHASES),
    *(
        _profiled(
            f"{span}_{name}_{kind}_fraction", "several, fused" if name == FUSED else name,
            _share(f"{kind}s", span, name),
        )
        for span in SHARED_SPANS
        for kind in ("kind", "part")
        for name in _ORDER[f"{kind}s"]
    ),
    *_columns("forward"),
    *_columns("backward"),
)  # fmt: skip


def no_kernels(frame: Frame, cell: int) -> list[str]:
    """Why runs of a cell have no kernels to show, each reason once."""
    runs = (run.record for run in frame.runs_of(cell, "ok") if run.record.is_profiled)
    return list(dict.fromkeys(run.kernels.reason for run in runs if run.kernels is not None and run.kernels.reason))


# charts


def _chart(spec: ChartSpec, frame: Frame, _column_of: ColumnOf) -> Chart | None:
    """Kernel time of a phase by part, by kind, or inside attention: a lying bar for each cell that has this phase."""
    kind, span = spec.kind, spec.y
    runs = {label: frame.runs_of(cell, "ok")[0].record for label, cell in rows_of(frame) if cell in frame.ok_cells}
    known = {label: times for label, run in runs.items() if (times := _times(run, kind, span))}
    if len(runs) > MAX_BARS or not known:
        return None
    # The same names in the charts of all phases: what is longest in the step, in the model's order.
    steps = pd.DataFrame({label: _times(runs[label], kind, "step") or times for label, times in known.items()})
    longest = steps.div(steps.sum()).max(axis=1).sort_index().sort_values(ascending=False, kind="stable")
    names = [name for name in _ORDER[kind] if name in longest.index[:_SHOWN]]
    table = pd.DataFrame(known).T
    others = [name for name in _ORDER[kind] if name in table and name not in names]
    totals, table = table.sum(axis=1), table.reindex(columns=names).fillna(0.0)
    if others:
        table[REST] = totals - table.sum(axis=1)
    points = []
    for name, seconds in table.items():
        for label, total in totals.items():
            share = 100 * seconds[label] / total if total else 0.0
            tip = f"{label}: {name} {units.milliseconds(seconds[label])} ms, {share:.1f} %"
            row = f"{label}, {total * 1e3:,.3g}\N{NO-BREAK SPACE}ms"
            points.append({"series": str(name), "x": row, "y": share, "tip": tip})
    inside = "scores, mask, softmax and values in " if kind == "attention" else ""
    caption = f"Share of the kernel time of {inside}{'the step' if span == 'step' else span}, with that time per step."
    return Chart("", stacked_chart(points, "share (%)"), caption + (f" Rest: {', '.join(others)}." if others else ""))


KERNELS = Feature(
    columns=COLUMNS,
    chart_kinds={
        kind: ChartKind(_chart, has_rows=True, spans=spans)
        for kind, spans in {"parts": SHARED_SPANS, "kinds": SHARED_SPANS, "attention": ("forward", "backward")}.items()
    },
    row_notes=no_kernels,
    charts=partial(
        page_charts, file=TIMELINE_FILE, is_meant=attrgetter("record.is_profiled"), chart=step_chart, read=read_timeline
    ),
)
