"""Columns: what a table or a chart can show of a cell, each with its unit and how it is summarized over runs.

A column has a name of its own, or it is any number of a run's record by its dotted name: then the schema says the rest.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import pandas as pd

from lmbench.errors import UsageError
from lmbench.files import Unreadable
from lmbench.precision import find_precision
from lmbench.records.load import Run, read_steps
from lmbench.records.run import RunRecord
from lmbench.records.schema import fields, value_at
from lmbench.records.statistics import ratio_of
from lmbench.records.step import StepRecord
from lmbench.records.store import STEPS_FILE
from lmbench.records.summary import host_bound_fraction
from lmbench.records.vocabulary import Span
from lmbench.report import answer, units
from lmbench.report.answer import Cell
from lmbench.report.frame import Expression, Frame
from lmbench.report.units import COUNT, GIB, PERCENT, SECONDS, TIMES, UNITS, Unit

#: Stands in a title for the baseline's name.
BASELINE = "{baseline}"
_CHANGE = Unit("%", 100.0, lambda value: units.signed(value * 100))
#: A difference of losses.
NAT = Unit("nat", 1.0, units.signed)
#: Steps at the beginning in which compiling is looked for, where the warm-up is shorter.
_COMPILING_STEPS = 5


def harmonic(rates: pd.Series) -> float:
    """Average rates harmonically, so that they agree with the mean step time."""
    return statistics.harmonic_mean([float(rate) for rate in rates])


@dataclass(frozen=True)
class Column:
    """One column.

    `name` is what a view and CSV call it (it ends in its SI unit), `title` what a heading does, without the unit.
    `expression` is a number of a run, which `over` combines over the ok runs of a cell; or, where `over` is None, a
    function of the frame and a cell that gives a number, a cell of an answer, or None.

    Args:
        within: the field that is the spread of a lone process, empty where it has none; None where no standard
            deviation stands beside the value.
        modes: the modes that have this number, all where empty.
        is_profiled: whether only profiled runs have it.
        is_planned: whether it is known of a cell of which no run ended well.
        is_costly: whether it is worked out only where a view names it: it reads steps.jsonl, or goes over many cells.
    """

    name: str
    title: str
    expression: Any
    unit: Unit
    over: Any = "mean"
    within: str | None = None
    modes: Sequence[str] = ()
    is_profiled: bool = False
    is_planned: bool = False
    is_costly: bool = False

    @property
    def is_of_one_process(self) -> bool:
        """Whether the value is a mean of numbers of processes, so that it has an interval between them."""
        return self.over in ("mean", harmonic)

    @property
    def is_relative(self) -> bool:
        return BASELINE in self.title

    @property
    def is_ratio(self) -> bool:
        """Whether the value is a ratio of means of processes, which two processes a side are needed to judge."""
        return self.is_relative and self.unit is TIMES

    def numbers(self, frame: Frame) -> pd.Series:
        """A number of each ok run that has it, by its cell."""
        numbers = frame.numbers(self.expression)
        return numbers[[not self.modes or frame.known[cell].get("mode") in self.modes for cell in numbers.index]]

    def of(self, frame: Frame) -> dict[int, Any]:
        """The cells that have a value, with it; of one that did not end well only what is known without that."""
        if self.over is None:
            cells = [cell for cell in frame.facts.index if self.is_planned or cell in frame.ok_cells]
            values = {cell: self.expression(frame, cell) for cell in cells}
            return {cell: v if isinstance(v, Cell) else Cell(v) for cell, v in values.items() if v is not None}
        by_cell = self.numbers(frame).groupby(level=0)
        if not len(by_cell):
            return {}
        spread = by_cell.std() if self.within is not None else pd.Series(dtype=float)
        if self.within:
            spread = spread.where(by_cell.size() > 1, frame.numbers(self.within).groupby(level=0).first())
        stds = spread.dropna().to_dict()
        return {cell: Cell(value, stds.get(cell)) for cell, value in by_cell.agg(self.over).to_dict().items()}

    def heading(self, frame: Frame) -> answer.Column:
        """The column as a table has it."""
        return answer.Column(self.title.replace(BASELINE, frame.base_name), self.unit, self.name)

    def text(self, cell: Cell) -> str:
        """A value in the heading's unit."""
        return answer.text_of(cell, self.unit)


#: What a function of a cell tells: a number, a cell of an answer, or None.
Read = Callable[[Frame, int], Any]


def per_cell(read: Callable[[Run], Any], *, is_shown: bool | None = True, outcome: str | None = "ok") -> Read:
    """What the first run of a cell tells that tells anything: a number, or a cell of an answer."""

    def of(frame: Frame, cell: int) -> Any:
        known = map(read, frame.runs_of(cell, outcome, is_shown))
        return next((value for value in known if value is not None), None)

    return of


def _waits(span: Span) -> Column:
    """The verdict of the lag probes on a phase, with the smallest lag within it; `mixed` where runs differ."""

    def of(frame: Frame, cell: int) -> Cell | None:
        words = {value_at(run.record, f"probe.verdicts.{span}.verdict") for run in frame.runs_of(cell, "ok")} - {None}
        (lags,) = values_of(frame.numbers(f"probe.verdicts.{span}.min_lag_s"), cell)
        lag = statistics.fmean(lags) if lags else None
        return Cell(lag, text=words.pop() if len(words) == 1 else "mixed") if words else None

    return Column(f"{span}_lag_s", f"{span} is", of, Unit("", 1e3, units.milliseconds), None)


def _skipped(run: RunRecord) -> float | None:
    precision = find_precision(str(run.precision))
    return run.window.skipped_count if precision is not None and precision.has_scaler else None


def _first_step(cache_kind: str) -> Expression:
    """First step of the runs that compiled into an empty cache (`private`), or with what an earlier run left."""
    return lambda run: run.compile.first_step_s if run.compile.cache == cache_kind else None


def _listed() -> Iterator[Column]:
    """The columns of columns.csv: numbers of a record, or sums of them."""
    with (files("lmbench.report") / "columns.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            over = harmonic if row["over"] == "harmonic" else row["over"]
            # `-`: the spread is that between processes, and a lone one has none.
            within = row["within"].strip("-") if row["within"] else None
            unit, modes = UNITS[row["unit"]], tuple(row["modes"].split())
            yield Column(row["name"], row["title"], row["expression"], unit, over, within, modes)


#: Share of the step in phases in which the device waited for the host, by the lag probes.
HOST_BOUND = Column("host_bound_fraction", "host-bound", host_bound_fraction, PERCENT)

MEASURED: tuple[Column, ...] = (
    *_listed(),
    HOST_BOUND,
    _waits("forward"),
    _waits("backward"),
    Column(
        "host_peak_bytes", "peak host memory",
        lambda run: run.memory.host_peak_rss_bytes if run.device_type == "cpu" else None, GIB, "max",
    ),
    Column("skipped_count", "skipped steps", _skipped, COUNT, "sum"),
    Column("cold_first_step_s", "cold first step", _first_step("private"), SECONDS),
    Column("warm_first_step_s", "first step, cache kept", _first_step("shared"), SECONDS),
)  # fmt: skip
STEP = MEASURED[0]


# against the baseline


def ratio(below: Sequence[float], above: Sequence[float]) -> Any:
    """The ratio of two means of processes with its 95 % interval, by Welch's t on logarithms."""
    if not len(below) or not len(above) or min(*below, *above) <= 0:
        return None
    interval = ratio_of(below, above)
    return Cell(statistics.fmean(above) / statistics.fmean(below), low=interval.low, high=interval.high)


def values_of(numbers: pd.Series, *cells: int) -> list[list[float]]:
    """The numbers of each of the cells, of its runs."""
    values, places = numbers.to_numpy(), numbers.index.to_numpy()
    return [values[places == cell].tolist() for cell in cells]


def _against(read: Callable[[Frame, int, int], Any]) -> Read:
    """What is read of a cell beside its baseline."""
    return lambda frame, cell: read(frame, cell, frame.base[cell]) if cell in frame.base else None


def _speedup(frame: Frame, cell: int, base: int) -> Any:
    """How many times faster: by tokens/s, as steps need not be of one size; by step time where nobody counts tokens."""
    return ratio(*values_of(frame.numbers("throughput.tokens_per_s"), base, cell)) or _slowdown(frame, base, cell)


def _efficiency(frame: Frame, cell: int, base: int) -> Any:
    """The speed-up by each rank: weak scaling where the batch of a rank stays, strong scaling where it shrinks."""
    faster: Cell | None = _speedup(frame, cell, base)
    if faster is None:
        return None
    ranks, others = (int(str(frame.known[known].get("ranks") or 1)) for known in (cell, base))
    ends: tuple[Any, ...] = (faster.value, faster.low, faster.high)
    value, low, high = (None if end is None else end * others / ranks for end in ends)
    return Cell(value, low=low, high=high)


def _slowdown(frame: Frame, cell: int, base: int) -> Any:
    return ratio(*values_of(frame.numbers("phases.step.mean_s"), base, cell))


def _memory_change(frame: Frame, cell: int, base: int) -> float | None:
    """By the device's peaks; of runs on a CPU by those predicted for a device, else by resident memory."""
    for name in (
        "memory.run_peak_allocated_bytes", "memory_prediction.peak_allocated_bytes", "memory.host_peak_rss_bytes",
    ):  # fmt: skip
        values, others = values_of(frame.numbers(name), cell, base)
        if values and others and max(others) > 0:
            return max(values) / max(others) - 1
    return None


def _difference(field: str, is_relative: bool = False) -> Callable[[Frame, int, int], Any]:
    """A number minus the baseline's, of two runs whose weights and data began alike."""

    def of(frame: Frame, cell: int, base: int) -> Any:
        runs, others = frame.by_seed(cell), frame.by_seed(base)
        pairs = [[value_at(known[seed].record, field) for known in (runs, others)] for seed in runs if seed in others]
        value, other = pairs[0] if pairs else (None, None)
        scale = other if is_relative else 1
        if value is None or other is None or not scale or not math.isfinite(value - other):
            return None
        return (value - other) / scale

    return of


def _pays_after(frame: Frame, cell: int, base: int) -> Cell | None:
    """After how many steps compiling into an empty cache has paid; infinite where it never does.

    A run's time after n steps is its excess at the beginning plus n times its steady step; the two lines meet at the
    difference of the excesses divided by that of the steps.
    """
    compiled = [run for run in frame.runs_of(cell, "ok") if run.record.compile.is_enabled]
    cold_runs = [run for run in compiled if run.record.compile.cache != "shared"]
    excesses = [_mean_excess_s(cold_runs), _mean_excess_s(frame.runs_of(base, "ok"))]
    means = values_of(frame.numbers("phases.step.mean_s"), cell, base)
    if None in excesses or not all(means):
        return None
    gain_s = statistics.fmean(means[1]) - statistics.fmean(means[0])
    if gain_s <= 0:
        return Cell(math.inf, text="never")
    steps = math.ceil(max(0.0, excesses[0] - excesses[1]) / gain_s)
    return Cell(steps, text=f"{steps:,} steps")


def _mean_excess_s(runs: Sequence[Run]) -> Any:
    """How much longer than steady ones the first steps of runs took in all; None where nobody knows."""
    excesses = []
    for run in runs:
        step, count = run.record.phases.step, max(run.record.window.warmup_steps or 0, _COMPILING_STEPS)
        times = [record.step_s for record in first_steps(run.path, count) if record.step_s is not None]
        if step is not None and step.median_s is not None and times:
            excesses.append(math.fsum(times) - len(times) * step.median_s)
    return statistics.fmean(excesses) if excesses else None


def first_steps(path: Path, count: int) -> Iterator[StepRecord]:
    """The first step records of a run's folder, warm-up included; of a torn or missing file those before the tear."""
    with suppress(Unreadable):
        for _, step in islice(read_steps(path / STEPS_FILE), count):
            if step is None:
                return
            yield step


RELATIVE = tuple(
    Column(name, title, _against(read), unit, None)
    for name, title, read, unit in (
        ("speedup", f"speed-up vs {BASELINE}", _speedup, TIMES),
        ("scaling_efficiency_fraction", f"efficiency vs {BASELINE}", _efficiency, PERCENT),
        ("slowdown", f"mean / mean of {BASELINE}", _slowdown, TIMES),
        ("memory_change_fraction", f"memory vs {BASELINE}", _memory_change, _CHANGE),
        ("first_loss_difference", f"first loss - {BASELINE}", _difference("loss.first"), NAT),
        (
            "gradient_norm_difference_fraction", f"gradient norm vs {BASELINE}",
            _difference("warmup.gradient_norm", is_relative=True), _CHANGE,
        ),
        ("pays_after_steps", f"pays after, vs {BASELINE}", _pays_after, COUNT),
    )
)  # fmt: skip


# any number of the schema


@cache
def schema_column(name: str) -> Column | None:
    """The column of a field of a run's record by its dotted name; None if there is no such field.

    Over runs it is the mean, of a peak the largest and of a minimum the smallest.

    Raises:
        UsageError: the field is no number.
    """
    field = fields("run").get(name)
    if field is None:
        return None
    if not field.about.is_number:
        raise UsageError(f"column {name!r} is {field.unit}; a column shows a number")
    last = name.rpartition(".")[2]
    over = "max" if last.startswith("max_") or "peak" in name else "min" if last.startswith("min_") else "mean"
    # The phase or the end of the window that it is of, where the title does not say it.
    parts = zip_longest(name.split("."), field.pattern.split("."))
    whose = [part for part, pattern in parts if pattern != part and part and part not in field.title.split()]
    return Column(name, " ".join([*whose, field.title]), name, units.unit_of(field.unit), over)
