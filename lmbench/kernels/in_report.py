"""The report's columns and row notes for runs that were recorded with the kernel profiler."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

from lmbench.kernels.names import FUSED, KINDS, PARTS
from lmbench.records.examined import KernelSummary
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
from lmbench.records.vocabulary import Span
from lmbench.report import units
from lmbench.report.answer import Cell
from lmbench.report.columns import CHANGE, STEP, Quantity
from lmbench.report.console import shortened
from lmbench.report.frame import Expression, Frame, MeasuredCell
from lmbench.report.run import largest_saving, path_cause
from lmbench.report.units import MS, PERCENT, Unit
from lmbench.report.view import Feature

#: The spans whose kernel time is divided into shares; `step` is the whole step in every mode.
SHARED_SPANS: tuple[Span, ...] = ("forward", "backward", "step")
# The width of a kernel's name in a cell that also shows its share.
_NAME_WIDTH = 40
_NAMES = {"part": (*PARTS, FUSED), "kind": KINDS}

# columns


def _share(kind: str, span: Span, name: str) -> Expression:
    """The share of a span's kernel time that one kind or part has; kernels of several parts count as `several`."""

    def share_of(run: RunRecord) -> float | None:
        times = value_at(run, f"kernels.phases.{span}.{kind}s") or {}
        total_s = math.fsum(times.values())
        names = {field: FUSED if "+" in field else field.removesuffix("_s") for field in times}
        named_s = [time_s for field, time_s in times.items() if names[field] == name]
        return math.fsum(named_s) / total_s if named_s and total_s else None

    return share_of


def _wait_fraction(run: RunRecord) -> float | None:
    """The share of the step's device time in which the device waits for the host, which the profiler slows."""
    wait_s, window_s = (value_at(run, f"kernels.phases.step.{name}") for name in ("host_wait_s", "window_s"))
    return wait_s / window_s if wait_s is not None and window_s else None


def _unhidden_fraction(run: RunRecord) -> float | None:
    """The share of a step that it would be shorter without synchronizing gradients."""
    with_s, without_s = run.probe.synchronized_step_s, run.probe.unsynchronized_step_s
    return 1 - without_s / with_s if with_s and without_s else None


def _top_other(_frame: Frame, cell: MeasuredCell) -> Cell | None:
    """The longest kernel of the step that is not a matrix product, and its share of kernel time."""
    if (row := cell.first("kernels.phases.step.top_other")) is None:
        return None
    return Cell(row.share_fraction, text=f"{shortened(row.name, _NAME_WIDTH)} {units.percent(row.share_fraction)}")


def _path_share(find: Callable[[KernelSummary], tuple[str, float] | None]) -> Callable[..., Cell | None]:
    """The words and time that `find` returns for the chain that sets the step, the time as a share of the chain."""

    def share_of(_frame: Frame, cell: MeasuredCell) -> Cell | None:
        # Traces come from runs of their own, which `cell.ok` may not have.
        for run in cell.runs:
            kernels = run.record.kernels
            if run.outcome == "ok" and kernels and kernels.path_s and (largest := find(kernels)):
                words, time_s = largest
                return Cell(time_s / kernels.path_s, text=f"{words} {units.percent(time_s / kernels.path_s)}")
        return None

    return share_of


#: The option of a run that makes a what-if true, and its value for the run that the prediction starts from.
WHAT_IF, NOTHING_CHANGED = "measure.what_if", "nothing"


def _predicted_s(frame: Frame, cell: MeasuredCell) -> float | None:
    """The step of a cell that makes a what-if true, predicted from the step and the trace of the unchanged cell.

    A change counts as a share of the step by the trace. Without launches what is left is the device's time, which a
    profiler lengthens a little.
    """
    unchanged = [other for other in frame.cells if other.facts.get(WHAT_IF) == NOTHING_CHANGED]
    if not unchanged:
        return None
    base = max(unchanged, key=lambda other: len(other.facts.items() & cell.facts.items()))
    changes = base.first("kernels.what_if")
    path_s: float = base.first("kernels.path_s")
    words = cell.facts.get(WHAT_IF)
    change_s, steps_s = (changes or {}).get(words), base.numbers(STEP.expression)
    if change_s is None or not steps_s:
        return None
    step_s = fmean(steps_s)
    return float(min(path_s + change_s, step_s) if words == "launches=0" else step_s * (1 + change_s / path_s))


def _prediction_error(frame: Frame, cell: MeasuredCell) -> float | None:
    """The predicted minus the measured step of a cell, as a share of the measured one."""
    predicted_s, steps_s = _predicted_s(frame, cell), cell.numbers(STEP.expression)
    return predicted_s / fmean(steps_s) - 1 if predicted_s and steps_s else None


#: A share whose cell is a name and the share.
_NAMED_SHARE = Unit(units.percent_number, scale=100.0)
_RATIO = "softmax_matmul_time_ratio"
#: Views show the record's other numbers by their dotted names.
COLUMNS: tuple[Quantity, ...] = (
    *(
        Quantity(f"{span}_matmul_fraction", f"matmul, {span}", f"kernels.phases.{span}.matmul_fraction", PERCENT)
        for span in SHARED_SPANS
    ),
    Quantity("top_other_fraction", "top kernel but matmul", _top_other, _NAMED_SHARE, None),
    Quantity("path_cause_fraction", "sets the traced step", _path_share(path_cause), _NAMED_SHARE, None),
    Quantity("path_saving_fraction", "would save most", _path_share(largest_saving), _NAMED_SHARE, None),
    Quantity("predicted_step_s", "predicted", _predicted_s, MS, None),
    Quantity("step_prediction_error_fraction", "predicted - step", _prediction_error, CHANGE, None),
    Quantity("trace_host_wait_fraction", "waits for host", _wait_fraction, PERCENT),
    Quantity("unhidden_communication_fraction", "unhidden communication", _unhidden_fraction, PERCENT),
    *(
        Quantity(f"{span}_{name}_{kind}_fraction", name, _share(kind, span, name), PERCENT)
        for span in SHARED_SPANS
        for kind in ("kind", "part")
        for name in _NAMES[kind]
    ),
    *(
        column
        for span in SHARED_SPANS[:2]
        for column in (
            Quantity(f"{span}_busy_s", f"{span}, device busy", f"kernels.phases.{span}.busy_s", MS, None),
            Quantity(
                f"{span}_{_RATIO}", "softmax / matmul, time", f"kernels.attention.{span}.{_RATIO}",
                Unit("{:.2f}".format),
            ),
        )
    ),
)  # fmt: skip


def _reasons(cell: MeasuredCell) -> list[str]:
    """The reasons why a profiled cell has no kernels to show, each once."""
    kernels = [run.record.kernels for run in cell.ok if run.record.is_profiled]
    return list(dict.fromkeys(summary.reason for summary in kernels if summary is not None and summary.reason))


KERNELS = Feature(columns=COLUMNS, row_notes=_reasons)
