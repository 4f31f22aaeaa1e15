"""Columns of profiled runs: kernel times, their shares by kind and part, and what is inside attention."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lmbench.kernels.trace.kinds import KINDS
from lmbench.kernels.trace.parts import PARTS
from lmbench.kernels.trace.shares import ATTENTION_PARTS
from lmbench.records.paths import lookup
from lmbench.report import units
from lmbench.report.cells import Cell
from lmbench.report.columns import Column, Measure, numbers, over_runs
from lmbench.report.text import KERNEL_WIDTH, shortened

#: What shares are of; `step` is the whole of any mode, `forward` also that of inference.
SHARED_PHASES = ("forward", "backward", "step")
#: Kernels of a compiled model that do the work of several parts at once.
FUSED = "several"
Reader = Callable[..., Measure | None]


@dataclass(frozen=True)
class Named(Measure):
    """A value of something that has a name of its own, such as the longest kernel."""

    name: str = ""


def share_name(phase: str, axis: str, name: str) -> str:
    """The column with the share of a kind or part in a phase's kernel time."""
    return f"{phase}_{name}_{axis}_fraction"


def times_by(cell: Cell, phase: str, axis: str) -> dict[str, float]:
    """Kernel time by kind or part of a phase, per step and averaged over runs, in s; what is fused is `several`."""
    sums: dict[str, list[float]] = {}
    for sample in cell.ok:
        own: dict[str, float] = {}
        for field, seconds in (lookup(sample.record, f"kernels.phases.{phase}.{axis}s") or {}).items():
            name = field.removesuffix("_s")
            key = FUSED if "+" in name else name
            own[key] = own.get(key, 0.0) + seconds
        for name, seconds in own.items():
            sums.setdefault(name, []).append(seconds)
    runs = len(numbers(cell, f"kernels.phases.{phase}.kernel_s"))
    return {name: math.fsum(values) / runs for name, values in sums.items()} if runs else {}


def no_kernels(cell: Cell) -> list[str]:
    """Why runs of a cell have no kernels to show, each reason once."""
    reasons = (lookup(sample.record, "kernels.reason") for sample in cell.ok if sample.record.get("is_profiled"))
    return list(dict.fromkeys(str(reason) for reason in reasons if reason))


def _kernel_count(cell: Cell, _baseline: Cell | None = None) -> Measure | None:
    """Kernels per step; 0 of a run that has none."""
    found = over_runs("kernels.phases.step.kernel_count")(cell)
    return Measure(0.0) if found is None and no_kernels(cell) else found


def _of_modes(path: str, modes: Iterable[str], *, others: bool = False) -> Reader:
    """A number where the cell's mode is one of these (or, with `others`, none of these)."""
    read, wanted = over_runs(path), set(modes)

    def of_cell(cell: Cell, _baseline: Cell | None = None) -> Measure | None:
        return read(cell) if (cell.facts.get("mode") in wanted) is not others else None

    return of_cell


def _share(phase: str, axis: str, name: str) -> Reader:
    def read(cell: Cell, _baseline: Cell | None = None) -> Measure | None:
        times = times_by(cell, phase, axis)
        total = math.fsum(times.values())
        return Measure(times[name] / total) if total and name in times else None

    return read


def _top_other(cell: Cell, _baseline: Cell | None = None) -> Measure | None:
    """The longest kernel of the step that is no matrix product, of the first run that has one."""
    for sample in cell.ok:
        top = lookup(sample.record, "kernels.phases.step.top_other")
        if isinstance(top, dict):
            return Named(top["share_fraction"], name=shortened(top["name"], KERNEL_WIDTH))
    return None


def _host_wait(cell: Cell, _baseline: Cell | None = None) -> Measure | None:
    """Share of the step's time on the device in which it waits for the host, slowed by the profiler."""
    shares = []
    for sample in cell.ok:
        phases = lookup(sample.record, "kernels.phases") or {}
        windows = [phase["window_s"] for phase in phases.values() if phase.get("window_s") is not None]
        waits = [phase["host_wait_s"] for phase in phases.values() if phase.get("host_wait_s") is not None]
        if windows and math.fsum(windows):
            shares.append(math.fsum(waits) / math.fsum(windows))
    return Measure(statistics.fmean(shares)) if shares else None


def _plain(show: Callable[[float], str]) -> Callable[[Measure], str]:
    return lambda measure: show(measure.value)


def _percent(value: float) -> str:
    return f"{value * 100:.1f}"


def _named(measure: Measure) -> str:
    name = measure.name if isinstance(measure, Named) else ""
    return f"{name} {_percent(measure.value)} %"


def _count(value: float) -> str:
    return units.whole(value) if value else "none"


_STEP = "kernels.phases.step"
_GENERAL: tuple[Column, ...] = (
    Column("kernel_count", "kernels", _kernel_count, _plain(_count)),
    Column("kernel_s", "kernel time (ms)", over_runs(f"{_STEP}.kernel_s"), _plain(units.milliseconds)),
    Column(
        "inference_matmul_fraction", "matmul, inference (%)",
        _of_modes("kernels.phases.forward.matmul_fraction", ("inference",)), _plain(_percent),
    ),
    Column(
        "forward_matmul_fraction", "matmul, forward (%)",
        _of_modes("kernels.phases.forward.matmul_fraction", ("inference",), others=True), _plain(_percent),
    ),
    Column(
        "backward_matmul_fraction", "matmul, backward (%)", over_runs("kernels.phases.backward.matmul_fraction"),
        _plain(_percent),
    ),
    Column(
        "step_matmul_fraction", "matmul, step (%)", _of_modes(f"{_STEP}.matmul_fraction", ("train_step",)),
        _plain(_percent),
    ),
    Column("top_other_fraction", "top kernel but matmul", _top_other, _named),
    Column("trace_host_wait_fraction", "waits for host (%)", _host_wait, _plain(_percent)),
    Column(
        "unclassified_part_fraction", "no part (%)", over_runs("kernels.unclassified_part_fraction"), _plain(_percent)
    ),
)  # fmt: skip

_TIMES: tuple[Column, ...] = tuple(
    Column(
        f"{phase}_kernel_s", f"{phase} (ms)", over_runs(f"kernels.phases.{phase}.kernel_s"), _plain(units.milliseconds)
    )
    for phase in ("forward", "backward", "optimizer")
)  # fmt: skip

_HEADINGS = {FUSED: "several, fused"}
_SHARES: tuple[Column, ...] = tuple(
    Column(
        share_name(phase, axis, name), f"{_HEADINGS.get(name, name)} (%)", _share(phase, axis, name), _plain(_percent)
    )
    for phase in SHARED_PHASES
    for axis, names in (("kind", KINDS), ("part", (*PARTS, FUSED)))
    for name in names
)

_ATTENTION: tuple[Column, ...] = tuple(
    column
    for phase in ("forward", "backward")
    for column in (
        *(
            Column(
                f"{phase}_{part}_s", f"{part} (ms)", over_runs(f"kernels.attention.{phase}.{part}_s"),
                _plain(units.milliseconds),
            )
            for part in (*ATTENTION_PARTS, "matmul")
        ),
        Column(
            f"{phase}_softmax_matmul_time_ratio", "softmax / matmul, time",
            over_runs(f"kernels.attention.{phase}.softmax_matmul_time_ratio"), _plain(lambda value: f"{value:.2f}"),
        ),
        Column(
            f"{phase}_softmax_matmul_flop_ratio", "softmax / matmul, FLOPs",
            over_runs(f"kernels.attention.{phase}.softmax_matmul_flop_ratio"), _plain(lambda value: f"{value:.4f}"),
        ),
    )
)  # fmt: skip

KERNELS: tuple[Column, ...] = (*_GENERAL, *_TIMES, *_SHARES, *_ATTENTION)
KERNEL_COLUMN: Mapping[str, Column] = {column.name: column for column in KERNELS}
