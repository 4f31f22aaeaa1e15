"""What kernels add to a report: columns of profiled runs, charts of kernel time, and notes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from lmbench.kernels.kinds import KINDS
from lmbench.kernels.parts import PARTS
from lmbench.kernels.step_chart import step_chart
from lmbench.kernels.step_timeline import TIMELINE_FILE, read_timeline
from lmbench.records.instruments import PhaseKernels
from lmbench.records.load import Run
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import Span
from lmbench.report import units
from lmbench.report.answer import Cell, Chart
from lmbench.report.catalogue import Feature
from lmbench.report.charts import MAX_BARS, ChartKind, ColumnOf, Series, rows_of, stacked_chart
from lmbench.report.columns import Column, per_cell
from lmbench.report.console import shortened
from lmbench.report.frame import Expression, Frame
from lmbench.report.palette import FUSED, MUTED, part_colour
from lmbench.report.palette import KINDS as KIND_COLOURS
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


def _times(run: RunRecord, kind: str, span: Span) -> dict[str, float]:
    """Kernel time of a phase by kind, by part or inside attention, in s per step; what is fused is `several`."""
    kernels = run.kernels
    if kernels is None:
        return {}
    if kind == "attention":
        attention = kernels.attention.get(span)
        inside = {name: getattr(attention, f"{name}_s", None) for name in _INSIDE}
        return {name: seconds for name, seconds in inside.items() if seconds is not None}
    phase, times = kernels.phases.get(span), dict[str, float]()
    for field, seconds in getattr(phase, kind, {}).items():
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
    kernels = run.record.kernels
    step = None if kernels is None else kernels.phases.step
    if step is not None and step.kernel_count is not None:
        return Cell(step.kernel_count)
    return Cell(0, text="none") if kernels is not None and kernels.reason and not kernels.operators else None


def _top_other(run: Run) -> Cell | None:
    """The longest kernel of the step that is no matrix product."""
    step = None if run.record.kernels is None else run.record.kernels.phases.step
    top = None if step is None else step.top_other
    if top is None:
        return None
    return Cell(top.share_fraction, text=f"{shortened(top.name, _NAME_WIDTH)} {units.percent(top.share_fraction)}")


def _top_operators(span: Span) -> Callable[[Run], Cell | None]:
    """A phase's longest operators on the host, of a run without kernels; the number is the first one's share."""

    def of(run: Run) -> Cell | None:
        operators = [] if run.record.kernels is None else run.record.kernels.operators
        rows = [row for row in operators if row.phase == span][:_NAMED]
        text = ", ".join(f"{shortened(row.name, _NAME_WIDTH)} {units.percent(row.share_fraction)}" for row in rows)
        return Cell(rows[0].share_fraction, text=text) if rows else None

    return of


def _busy(span: Span) -> Callable[[Frame], Mapping[int, Cell]]:
    """How long the device was busy with a phase, from profiled runs beside a cell's timing runs: about what its span
    would be if the device never waited."""

    def of(frame: Frame) -> dict[int, Cell]:
        cells = {}
        for cell in frame.facts.index:
            found = [run.record.kernels for run in frame.runs_of(cell, "ok", None)]
            phases = [phase for kernels in found if kernels and (phase := kernels.phases.get(span))]
            times = [seconds for phase in phases if (seconds := phase.busy_s or phase.kernel_s)]
            if times:
                cells[cell] = Cell(statistics.fmean(times))
        return cells

    return of


def _columns(span: Span) -> list[Column]:
    """Columns of a phase: its kernels, and what is inside attention written out."""
    attention = f"kernels.attention.{span}"
    ratio = f"{span}_softmax_matmul_"
    return [
        Column(f"{span}_busy_s", f"{span}, device busy", _busy(span), MS, None),
        *(_profiled(f"{span}_{name}_s", name, f"{attention}.{name}_s", MS) for name in (*_INSIDE, "matmul")),
        _profiled(
            f"{ratio}time_ratio", "softmax / matmul, time", f"{attention}.softmax_matmul_time_ratio",
            Unit("", 1.0, "{:.2f}".format),
        ),
        _profiled(
            f"{ratio}flop_ratio", "softmax / matmul, FLOPs", f"{attention}.softmax_matmul_flop_ratio",
            Unit("", 1.0, "{:.4f}".format),
        ),
    ]  # fmt: skip


_TITLES = {FUSED: "several, fused"}
_TRAINING = ("forward", "forward_backward", "train_step")
COLUMNS: tuple[Column, ...] = (
    Column("kernel_count", "kernels", per_cell(_kernel_count), COUNT, None, is_profiled=True),
    _profiled("kernel_s", "kernel time", "kernels.phases.step.kernel_s", MS),
    *(
        _profiled(name, title, f"kernels.phases.{span}.matmul_fraction", modes=modes)
        for name, title, span, modes in (
            ("inference_matmul_fraction", "matmul, inference", "forward", ("inference",)),
            ("forward_matmul_fraction", "matmul, forward", "forward", _TRAINING),
            ("backward_matmul_fraction", "matmul, backward", "backward", ()),
            ("step_matmul_fraction", "matmul, step", "step", ("train_step",)),
        )
    ),
    _first("top_other_fraction", "top kernel but matmul", _top_other),
    _profiled("trace_host_wait_fraction", "waits for host", _share_of_window(lambda phase: phase.host_wait_s)),
    _profiled("trace_idle_fraction", "device idle", _share_of_window(_idle_s)),
    _profiled("unclassified_part_fraction", "no part", "kernels.unclassified_part_fraction"),
    *(_profiled(f"{s}_kernel_s", s, f"kernels.phases.{s}.kernel_s", MS) for s in ("forward", "backward", "optimizer")),
    *(_first(f"{s}_top_operator_fraction", s, _top_operators(s)) for s in ("forward", "backward", "optimizer")),
    *(
        _profiled(f"{span}_{name}_{kind}_fraction", _TITLES.get(name, name), _share(f"{kind}s", span, name))
        for span in SHARED_SPANS
        for kind, names in (("kind", KINDS), ("part", (*PARTS, FUSED)))
        for name in names
    ),
    *_columns("forward"),
    *_columns("backward"),
)  # fmt: skip


def no_kernels(frame: Frame, cell: int) -> list[str]:
    """Why runs of a cell have no kernels to show, each reason once."""
    kernels = (run.record.kernels for run in frame.runs_of(cell, "ok") if run.record.is_profiled)
    return list(dict.fromkeys(found.reason for found in kernels if found is not None and found.reason))


# charts


def _chart(spec: ChartSpec, frame: Frame, _column_of: ColumnOf) -> Chart | None:
    """Kernel time of a phase by part, by kind, or inside attention: a lying bar for each cell that has this phase."""
    kind, span = spec.kind, next(span for span in SHARED_SPANS if span == spec.y)
    rows = [(label, frame.runs_of(cell, "ok")[0].record) for label, cell in rows_of(frame) if cell in frame.ok_cells]
    known = [(label, run, times) for label, run in rows if (times := _times(run, kind, span))]
    if len(rows) > MAX_BARS or not known:
        return None
    # The same names in the charts of all phases: what is longest in the step, in the model's order.
    longest = dict[str, float]()
    for _, run, times in known:
        whole = _times(run, kind, "step") or times
        for name, seconds in whole.items():
            longest[name] = max(longest.get(name, 0.0), seconds / (math.fsum(whole.values()) or 1.0))
    names = sorted(longest, key=lambda name: (-longest[name], name))[:_SHOWN]
    series = [Series(n, [], MUTED if n == REST else _colour(kind, n)) for n in _ORDER[kind] if n in names]
    series.append(Series(REST, [], MUTED))
    for label, _, times in known:
        total = math.fsum(times.values())
        shown = {name: times.get(name, 0.0) for name in names}
        for each in series:
            seconds = shown.get(each.label, total - math.fsum(shown.values()))
            share = 100 * seconds / total if total else 0.0
            tip = f"{label}: {each.label} {units.milliseconds(seconds)} ms, {share:.1f} %"
            each.points.append({"x": f"{label}, {total * 1e3:,.3g}\N{NO-BREAK SPACE}ms", "y": share, "tip": tip})
    others = [name for name in _ORDER[kind] if name not in names and any(name in times for _, _, times in known)]
    inside = "scores, mask, softmax and values in " if kind == "attention" else ""
    caption = f"Share of the kernel time of {inside}{'the step' if span == 'step' else span}, with that time per step."
    caption += f" Rest: {', '.join(others)}." if others else ""
    return Chart("", stacked_chart(series if others else series[:-1], "share (%)"), caption)


def _colour(kind: str, name: str) -> int:
    return KIND_COLOURS.get(name, MUTED) if kind == "kinds" else part_colour(name)


def _timelines(frame: Frame) -> list[Chart]:
    is_meant = attrgetter("record.is_profiled")
    return page_charts(frame, TIMELINE_FILE, is_meant, step_chart, read_timeline)


KERNELS = Feature(
    columns=COLUMNS,
    chart_kinds={
        kind: ChartKind(_chart, has_rows=True, spans=spans)
        for kind, spans in {"parts": SHARED_SPANS, "kinds": SHARED_SPANS, "attention": ("forward", "backward")}.items()
    },
    row_notes=no_kernels,
    charts=_timelines,
)
