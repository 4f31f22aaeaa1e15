"""Columns: what a table or a chart can show of a cell, each with its unit and how it is summarized over runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lmbench.records.paths import lookup
from lmbench.records.statistics import sample_std
from lmbench.records.vocabulary import BACKWARD_MODES, PHASES
from lmbench.report import units
from lmbench.report.cells import Cell
from lmbench.report.sample import Sample

#: Stands in a heading for the baseline's name.
BASELINE = "{baseline}"


@dataclass(frozen=True)
class Measure:
    """A cell's value in SI units with its standard deviation: between processes, or within the only one.

    `low` and `high` are the ends of a 95 % interval, where there is one.
    """

    value: float
    std: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Column:
    """One column.

    `name` is what a view and CSV call it (it ends in its SI unit), `heading` names the unit shown. `read` takes the
    cell and its baseline (None where there is none), `show` makes the text.
    """

    name: str
    heading: str
    read: Callable[[Cell, Cell | None], Measure | None]
    show: Callable[[Measure], str]
    has_spread: bool = False

    @property
    def is_relative(self) -> bool:
        return BASELINE in self.heading


def numbers(cell: Cell, path: str) -> list[float]:
    """A number of each ok run that has it."""
    return [value for sample in cell.ok if (value := sample.number(path)) is not None]


def over_runs(
    path: str, combine: Callable[[Iterable[float]], float] = statistics.fmean
) -> Callable[..., Measure | None]:
    """One number a run, combined over runs; the spread is the standard deviation between runs."""

    def read(cell: Cell, _baseline: Cell | None = None) -> Measure | None:
        values = numbers(cell, path)
        if not values:
            return None
        return Measure(combine(values), sample_std(values, statistics.fmean(values)))

    return read


def phase_time(phase: str, modes: Iterable[str] | None = None) -> Callable[..., Measure | None]:
    """Mean time of a phase: over the means of all processes, or within the only one; only where the mode has it."""
    wanted = None if modes is None else set(modes)

    def read(cell: Cell, _baseline: Cell | None = None) -> Measure | None:
        if wanted is not None and cell.facts.get("mode") not in wanted:
            return None
        means = numbers(cell, f"phases.{phase}.mean_s")
        if not means:
            return None
        if len(means) > 1:
            return Measure(statistics.fmean(means), sample_std(means, statistics.fmean(means)))
        spreads = numbers(cell, f"phases.{phase}.std_s")
        return Measure(means[0], spreads[0] if spreads else None)

    return read


def _host_peak(cell: Cell, _baseline: Cell | None = None) -> Measure | None:
    """Resident memory of the process, where there is no device memory."""
    on_device = [sample for sample in cell.ok if sample.record.get("device_type") != "cpu"]
    return None if on_device else over_runs("memory.host_peak_rss_bytes", max)(cell)


def host_bound(cell: Cell, _baseline: Cell | None = None) -> Measure | None:
    """Share of the step in phases in which the device waited for the host, by the lag probes; mean over runs."""
    shares = [share for sample in cell.ok if (share := _host_bound_share(sample)) is not None]
    return Measure(statistics.fmean(shares)) if shares else None


def _host_bound_share(sample: Sample) -> float | None:
    verdicts = lookup(sample.record, "probe.verdicts")
    if not verdicts:
        return None
    bound = (phase for phase in PHASES if lookup(sample.record, f"probe.verdicts.{phase}.verdict") == "host-bound")
    return math.fsum(sample.number(f"phases.{phase}.share_fraction") or 0.0 for phase in bound)


def _skipped(cell: Cell, _baseline: Cell | None = None) -> Measure | None:
    if not str(cell.facts.get("precision", "")).startswith("16-"):
        return None
    return over_runs("window.skipped_count", math.fsum)(cell)


def _cold_first_step(cell: Cell, _baseline: Cell | None = None) -> Measure | None:
    return _first_step(cell, "private")


def _warm_first_step(cell: Cell, _baseline: Cell | None = None) -> Measure | None:
    return _first_step(cell, "shared")


def _first_step(cell: Cell, cache: str) -> Measure | None:
    """First step of the runs that compiled into an empty cache (`private`), or found what an earlier one left."""
    runs = [sample for sample in cell.ok if lookup(sample.record, "compile.cache") == cache]
    values = [value for sample in runs if (value := sample.number("compile.first_step_s")) is not None]
    return Measure(statistics.fmean(values)) if values else None


def _time(measure: Measure) -> str:
    return units.mean_and_std(measure.value, measure.std)


def _plain(show: Callable[[float], str]) -> Callable[[Measure], str]:
    return lambda measure: show(measure.value)


def _milli(value: float) -> str:
    return f"{value * 1e3:.3g}"


def _percent(value: float) -> str:
    return f"{value * 100:.1f}"


MEASURED: tuple[Column, ...] = (
    Column("step_s", "step (ms)", phase_time("step"), _time, True),
    Column("data_s", "data (ms)", phase_time("data"), _time, True),
    Column("transfer_s", "transfer (ms)", phase_time("transfer"), _time, True),
    Column("forward_s", "forward (ms)", phase_time("forward"), _time, True),
    Column("backward_s", "backward (ms)", phase_time("backward", BACKWARD_MODES), _time, True),
    Column("clip_s", "clip (ms)", phase_time("clip", ("train_step",)), _time, True),
    Column("optimizer_s", "optimizer (ms)", phase_time("optimizer", ("train_step",)), _time, True),
    Column("zero_grad_s", "zero_grad (ms)", phase_time("zero_grad", BACKWARD_MODES), _time, True),
    Column("other_s", "other (ms)", phase_time("other"), _time, True),
    Column("step_median_s", "median (ms)", over_runs("phases.step.median_s"), _plain(units.milliseconds)),
    Column("step_min_s", "min (ms)", over_runs("phases.step.min_s", min), _plain(units.milliseconds)),
    Column("step_max_s", "max (ms)", over_runs("phases.step.max_s", max), _plain(units.milliseconds)),
    Column("step_cv_fraction", "CV within a run (%)", over_runs("phases.step.cv_fraction"), _plain(_percent)),
    Column("tokens_per_s", "tokens/s", over_runs("throughput.tokens_per_s"), _plain(units.whole)),
    Column("mfu_fraction", "MFU (%)", over_runs("throughput.mfu_fraction"), _plain(_percent)),
    Column("host_bound_fraction", "host-bound (%)", host_bound, _plain(_percent)),
    Column(
        "peak_bytes", "peak memory (GiB)", over_runs("memory.run_peak_allocated_bytes", max), _plain(units.gib_number)
    ),
    Column("host_peak_bytes", "peak host memory (GiB)", _host_peak, _plain(units.gib_number)),
    Column("joules_per_token", "mJ/token", over_runs("throughput.joules_per_token"), _plain(_milli)),
    Column("first_loss", "first loss (nat)", over_runs("loss.first"), _plain(lambda v: f"{v:.4f}")),
    Column("skipped_count", "skipped steps", _skipped, _plain(units.whole)),
    Column("cold_first_step_s", "cold first step (s)", _cold_first_step, _plain(units.seconds)),
    Column("warm_first_step_s", "first step, cache kept (s)", _warm_first_step, _plain(units.seconds)),
    Column("graph_count", "graphs", over_runs("compile.graph_count", max), _plain(units.whole)),
    Column("graph_break_count", "graph breaks", over_runs("compile.graph_break_count", max), _plain(units.whole)),
)  # fmt: skip

MEASURED_COLUMN: Mapping[str, Column] = {column.name: column for column in MEASURED}
