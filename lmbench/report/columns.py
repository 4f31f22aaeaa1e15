"""Columns: quantities of a cell for tables and charts, each with its unit and its summary over the cell's runs.

A column is listed here or by a feature. Any other number of a run's record is a column under its dotted name; its title
and unit then come from the schema.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, wraps
from inspect import getdoc
from itertools import zip_longest
from typing import Any

from lmbench.errors import UsageError
from lmbench.records.field import Over, mean_of
from lmbench.records.schema import SchemaField, fields, value_at
from lmbench.records.statistics import CONFIDENCE, have_logs, holm, mean_interval, ratio_of, sample_std
from lmbench.records.summary import host_bound_fraction
from lmbench.records.vocabulary import MIN_REPEATS
from lmbench.report import shipped
from lmbench.report.answer import Cell, Column, listed, text_of
from lmbench.report.frame import Expression, Frame, MeasuredCell
from lmbench.report.units import GIB, MS, PERCENT, SECONDS, TIMES, Unit, signed, unit_of
from lmbench.rooms import ROOMS

#: The placeholder of the baseline's name in a title.
BASELINE = "{baseline}"
#: Begins the names of columns of logged scalars, whose units are in the records.
_SCALARS = "scalars."
#: Begins the names of columns that a run may have under any name: logged scalars, and what rooms of installed packages
#: recorded.
OPEN = (_SCALARS, "rooms.")
#: Begins the names of what the runs of a pass have alone.
_OF_PASSES = (*OPEN, *(f"{room.field}." for room in ROOMS if room.field))
#: The unit of a change relative to the baseline.
CHANGE = Unit(lambda value: signed(value * 100), "%", 100.0)
#: The unit of a difference of losses.
NAT = Unit(signed, "nat")
_REDUCTIONS: Mapping[Over, Callable[[Sequence[float]], float]] = {
    "mean": mean_of, "harmonic mean": statistics.harmonic_mean, "max": max, "min": min, "sum": math.fsum,
}  # fmt: skip


@dataclass(frozen=True)
class Quantity:
    """A quantity of cells, which a column of a table or an axis of a chart shows.

    `name` is its name in views and CSV and ends in its SI unit; `title` is its heading without the unit. `expression`
    is a number of a run, which `over` combines over the ok runs of a cell.

    If `over` is None, `expression` is a function of the frame and a cell that returns a number, a Cell or None; or a
    dotted name, for the first value that one of the cell's runs, of any pass and outcome, has. Memory histories and
    traces come from runs of their own, and predictions are the same in all runs.
    """

    name: str
    title: str
    expression: Any
    unit: Unit
    over: Over | None = "mean"

    @property
    def is_process_mean(self) -> bool:
        """Whether the value is a mean over processes, which has an interval between them."""
        return self.over in ("mean", "harmonic mean")

    @property
    def has_spread(self) -> bool:
        """Whether a standard deviation is shown: between processes, or within the run if there is only one."""
        return isinstance(self.expression, str) and self.expression.endswith(".mean_s")

    @property
    def meaning(self) -> str:
        """The title with the unit that it is shown in, the numbers of runs behind it, and how they are used."""
        field = isinstance(self.expression, str) and f"of `{self.expression}`"
        origin = listed(self.unit.word, self.over and f"{self.over} over the processes", field)
        title = self.title.replace(BASELINE, "the baseline")
        about = "" if field else (getdoc(self.expression) or "").partition("\n\n")[0]
        return listed(f"{title} ({origin})" if origin else title, about, separator=": ")

    def of(self, frame: Frame) -> dict[MeasuredCell, Any]:
        """The value of each cell that has one, as a Cell of an answer."""
        values = {cell: self._value(frame, cell) for cell in frame.cells}
        cells = {cell: v if isinstance(v, Cell) else Cell(v) for cell, v in values.items() if v is not None}
        # The rows of a section are tested together.
        tested = {cell: v.p for cell, v in cells.items() if v.p is not None}
        for cell, p in zip(tested, holm([*tested.values()]), strict=True):
            cells[cell] = replace(cells[cell], p=p, notes=(_UNDECIDED,) if p >= 1 - CONFIDENCE else ())
        return cells

    def _value(self, frame: Frame, cell: MeasuredCell) -> Any:
        """The value of a cell: its processes' numbers as one, with spread and interval where the column shows them."""
        is_field = isinstance(self.expression, str)
        if self.over is None:
            return cell.first(self.expression) if is_field else self.expression(frame, cell)
        numbers = cell.numbers(self.expression)
        if not numbers:
            is_of_pass = is_field and self.expression.startswith(_OF_PASSES)
            return cell.first(self.expression) if is_of_pass and (cell.ok or not cell.shown) else None
        std = low = high = None
        if self.has_spread:
            std = sample_std(numbers)
            # A sum of phases has no standard deviation within a run.
            if std is None and "+" not in self.expression:
                std = next(iter(cell.numbers(self.expression.replace("mean_s", "std_s"))), None)
            if len(numbers) >= MIN_REPEATS:
                low, high = mean_interval(numbers)
                # A wide spread of few processes reaches below zero, where no time is.
                low = max(low, 0.0)
        return Cell(_REDUCTIONS[self.over](numbers), std, low, high)

    def column(self, frame: Frame) -> Column:
        """The column of a table that shows this quantity."""
        unit = self.unit
        if self.name.startswith(_SCALARS) and not unit.word:
            words = (run.record.scalar_units.get(self.name.removeprefix(_SCALARS)) for run in frame.runs)
            unit = replace(unit, word=next(filter(None, words), ""))
        return Column(self.title.replace(BASELINE, frame.base_name), unit, self.name)

    def text(self, cell: Cell) -> str:
        """A value as text with its unit."""
        return f"{text_of(cell, self.unit)} {self.unit.word}".rstrip()


#: A function of a cell that returns a number, a Cell of an answer, or None.
Read = Callable[[Frame, MeasuredCell], Any]


def _first_step(cache_kind: str) -> Expression:
    """The first step's time of runs that compiled into an empty cache (`private`) or with an earlier one (`shared`)."""
    return lambda run: run.compile.first_step_s if run.compile.cache == cache_kind else None


def _column_of(field: SchemaField, name: str = "") -> Quantity:
    """The column of a field, by default under its dotted name."""
    # Name the phase or the end of the window (open, close) where the title does not.
    parts = zip_longest(field.name.split("."), field.pattern.split("."))
    varying = [part for part, pattern in parts if pattern != part and part and part not in field.title.split()]
    title = " ".join([*varying, field.title])
    return Quantity(name or field.name, title, field.name, unit_of(field.unit), field.about.over)


MEASURED: tuple[Quantity, ...] = (
    *(
        _column_of(fields("run")[row["field"]], row["name"])
        for row in csv.DictReader(shipped("columns.csv").splitlines())
    ),
    Quantity(
        "forward_backward_s", "forward + backward", "phases.forward.mean_s + phases.backward.mean_s", MS,
    ),
    # The share of the step spent in phases in which the device waited for the host, by the lag probes.
    Quantity("host_bound_fraction", "host-bound", host_bound_fraction, PERCENT),
    Quantity(
        "host_peak_bytes", "peak host memory",
        lambda run: run.memory.host_peak_rss_bytes if run.device_type == "cpu" else None, GIB, "max",
    ),
    Quantity("cold_first_step_s", "cold first step", _first_step("private"), SECONDS),
    Quantity("warm_first_step_s", "first step, cache kept", _first_step("shared"), SECONDS),
)  # fmt: skip
STEP = MEASURED[0]
#: The figures by which configurations are known: in a list of results, and beside those of another report.
KNOWN_BY = ("step_s", "tokens_per_s", "peak_bytes")


# against the baseline

_FEW_PROCESSES = f"not decided: fewer than {MIN_REPEATS} processes on a side; --repeats {MIN_REPEATS}"
_UNDECIDED = "undecided: may be chance, by Holm's correction over the rows"


def _ratio(expression: str, cell: MeasuredCell, base: MeasuredCell, scale: float, over: Over = "mean") -> Cell | None:
    """The ratio of a cell's mean to its baseline's, with the 95 % interval of Welch's t on logarithms of process means.

    None unless both sides have numbers and all are positive. The baseline's own ratio is 1 and has no interval. With
    too few processes on a side there is a note instead of the interval. The cell's numbers are multiplied by `scale`;
    `over` names the mean, as in Quantity.
    """
    base_numbers, numbers = base.numbers(expression), [n * scale for n in cell.numbers(expression)]
    if not have_logs(base_numbers) or not have_logs(numbers):
        return None
    if cell == base:
        return Cell(1.0)
    mean, ratio = _REDUCTIONS[over], ratio_of(base_numbers, numbers)
    point = mean(numbers) / mean(base_numbers)
    if min(ratio.n_a, ratio.n_b) < MIN_REPEATS:
        return Cell(point, notes=(_FEW_PROCESSES,))
    return Cell(point, low=ratio.low, high=ratio.high, p=ratio.p)


def _against(read: Callable[[MeasuredCell, MeasuredCell], Any]) -> Read:
    """A function of a cell from one of a cell and its baseline; None for cells without a baseline."""
    return wraps(read)(lambda frame, cell: cell.base and read(cell, cell.base))


def _speedup(cell: MeasuredCell, base: MeasuredCell, scale: float = 1.0) -> Cell | None:
    """The ratio of tokens/s, since steps may differ in size; of step times where no tokens are counted."""
    return _ratio("throughput.tokens_per_s", cell, base, scale, "harmonic mean") or _ratio(
        STEP.expression, base, cell, scale
    )


def _efficiency(cell: MeasuredCell, base: MeasuredCell) -> Cell | None:
    """The speed-up divided by the ratio of ranks: weak scaling if the batch of a rank stays, strong if it shrinks."""
    # A run that died early has its ranks as planned, such as `auto`.
    ranks, base_ranks = (max(side.numbers("world_size"), default=1) for side in (cell, base))
    return _speedup(cell, base, base_ranks / ranks)


def _memory_change(cell: MeasuredCell, base: MeasuredCell) -> float | None:
    """The relative change of the device's peak memory, or of that predicted for a device."""
    for name in ("memory.run_peak_allocated_bytes", "memory_prediction.peak_allocated_bytes"):
        peak, base_peak = (max(side.numbers(name), default=0) for side in (cell, base))
        if peak and base_peak:
            return peak / base_peak - 1
    return None


def _difference(field: str, is_relative: bool = False) -> Callable[[MeasuredCell, MeasuredCell], Any]:
    """A field minus the baseline's, from two runs with the same seeds of weights and data; with `is_relative` as a
    fraction of the baseline's."""

    def of(cell: MeasuredCell, base: MeasuredCell) -> Any:
        runs, base_runs = cell.by_seed, base.by_seed
        seed = next((seed for seed in runs if seed in base_runs), None)
        if seed is None:
            return None
        value, base_value = (value_at(side[seed].record, field) for side in (runs, base_runs))
        scale = base_value if is_relative else 1
        if value is None or base_value is None or not scale or not math.isfinite(value - base_value):
            return None
        return (value - base_value) / scale

    return of


RELATIVE = (
    Quantity("speedup", f"speed-up vs {BASELINE}", _against(_speedup), TIMES, None),
    Quantity("scaling_efficiency_fraction", f"efficiency vs {BASELINE}", _against(_efficiency), PERCENT, None),
    Quantity("memory_change_fraction", f"memory vs {BASELINE}", _against(_memory_change), CHANGE, None),
    Quantity("first_loss_difference", f"first loss - {BASELINE}", _against(_difference("loss.first")), NAT, None),
    Quantity(
        "gradient_norm_difference_fraction", f"gradient norm vs {BASELINE}",
        _against(_difference("warmup.gradient_norm", is_relative=True)), CHANGE, None,
    ),
)  # fmt: skip


# any number of the schema


@cache
def schema_column(name: str) -> Quantity | None:
    """The column of a field of a run's record by its dotted name, of any logged scalar or of what a room
    recorded; None for other names.

    It shows the mean over the timed runs, or what the field's `over` says; a number that a pass alone records, the
    pass's run has.

    Raises:
        UsageError: the field is no number.
    """
    field = fields("run").get(name)
    if field is not None and not field.about.is_number:
        raise UsageError(f"column {name!r} is {field.unit}; a column shows a number")
    if field is None and name.startswith(OPEN):
        return Quantity(name, f"mean {name.partition('.')[2]}", name, unit_of("1"))
    return None if field is None else _column_of(field)
