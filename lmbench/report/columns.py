"""Columns: what a table or a chart can show of a cell, each with its unit and how it is summarized over runs.

A column has a name of its own, or it is any number of a run's record by its dotted name: then the schema says the rest.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from lmbench.errors import UsageError
from lmbench.files import Unreadable
from lmbench.records.load import Run, read_steps
from lmbench.records.schema import fields, value_at
from lmbench.records.statistics import ratio_of, sample_std
from lmbench.records.step import StepRecord
from lmbench.records.store import STEPS_FILE
from lmbench.records.summary import host_bound_fraction
from lmbench.report import answer, shipped, units
from lmbench.report.answer import Cell
from lmbench.report.frame import Expression, Frame
from lmbench.report.units import GIB, PERCENT, SECONDS, TIMES, UNITS, Unit

#: Stands in a title for the baseline's name.
BASELINE = "{baseline}"
_CHANGE = Unit("%", 100.0, lambda value: units.signed(value * 100))
#: A difference of losses.
NAT = Unit("nat", 1.0, units.signed)
#: How numbers of runs become one of a cell: rates harmonically, so that they agree with the mean step time.
_OVER: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean, "harmonic": statistics.harmonic_mean, "max": max, "min": min, "sum": math.fsum,
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """One column.

    `name` is what a view and CSV call it (it ends in its SI unit), `title` what a heading does, without the unit.
    `expression` is a number of a run, which `over` (a key of _OVER) combines over the ok runs of a cell; or, where
    `over` is None, a function of the frame and a cell that gives a number, a cell of an answer, or None.
    """

    name: str
    title: str
    expression: Any
    unit: Unit
    over: str | None = "mean"

    @property
    def is_of_one_process(self) -> bool:
        """Whether the value is a mean of numbers of processes, so that it has an interval between them."""
        return self.over in ("mean", "harmonic")

    @property
    def has_spread(self) -> bool:
        """Whether a standard deviation stands beside the value: that between processes, else that within the run."""
        return isinstance(self.expression, str) and self.expression.endswith(".mean_s")

    @property
    def is_relative(self) -> bool:
        return BASELINE in self.title

    def of(self, frame: Frame) -> dict[int, Any]:
        """The cells that have a value, with it."""
        if self.over is None:
            values = {cell: self.expression(frame, cell) for cell in frame.known}
            return {cell: v if isinstance(v, Cell) else Cell(v) for cell, v in values.items() if v is not None}
        # Phases that are summed up have no spread within a run.
        is_single = self.has_spread and "+" not in self.expression
        lone = self.expression.replace("mean_s", "std_s") if is_single else ""
        cells = {}
        for cell in frame.ok:
            if numbers := frame.numbers(cell, self.expression):
                std = sample_std(numbers) if numbers[1:] else next(iter(frame.numbers(cell, lone)), None)
                cells[cell] = Cell(_OVER[self.over](numbers), std if self.has_spread else None)
        return cells

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


def beside(name: str) -> Read:
    """A number that the first run of a cell has under a dotted name, of any pass and outcome: of a history or a trace,
    which are runs of their own beside those that are timed, or of a prediction, which all runs share."""
    return per_cell(lambda run: value_at(run.record, name), is_shown=None, outcome=None)


def _first_step(cache_kind: str) -> Expression:
    """First step of the runs that compiled into an empty cache (`private`), or with what an earlier run left."""
    return lambda run: run.compile.first_step_s if run.compile.cache == cache_kind else None


#: Share of the step in phases in which the device waited for the host, by the lag probes.
HOST_BOUND = Column("host_bound_fraction", "host-bound", host_bound_fraction, PERCENT)

MEASURED: tuple[Column, ...] = (
    *(
        Column(row["name"], row["title"], row["expression"], UNITS[row["unit"]], row["over"])
        for row in csv.DictReader(shipped("columns.csv").splitlines())
    ),
    HOST_BOUND,
    Column(
        "host_peak_bytes", "peak host memory",
        lambda run: run.memory.host_peak_rss_bytes if run.device_type == "cpu" else None, GIB, "max",
    ),
    Column("cold_first_step_s", "cold first step", _first_step("private"), SECONDS),
    Column("warm_first_step_s", "first step, cache kept", _first_step("shared"), SECONDS),
)  # fmt: skip
STEP = MEASURED[0]


# against the baseline


def _ratio(frame: Frame, expression: str, cell: int, base: int, over: str = "mean") -> Any:
    """How many times the mean of a cell's processes is that of the base's, with its 95 % interval by Welch's t on
    logarithms; `over` is which mean, as of a Column."""
    below, above = frame.numbers(base, expression), frame.numbers(cell, expression)
    if not below or not above or min(*below, *above) <= 0:
        return None
    interval = ratio_of(below, above)
    return Cell(_OVER[over](above) / _OVER[over](below), low=interval.low, high=interval.high)


def _against(read: Callable[[Frame, int, int], Any]) -> Read:
    """What is read of a cell beside its baseline."""
    return lambda frame, cell: read(frame, cell, frame.base[cell]) if cell in frame.base else None


def _speedup(frame: Frame, cell: int, base: int) -> Any:
    """How many times faster: by tokens/s, as steps need not be of one size; by step time where nobody counts tokens."""
    return _ratio(frame, "throughput.tokens_per_s", cell, base, "harmonic") or _ratio(
        frame, STEP.expression, base, cell
    )


def _efficiency(frame: Frame, cell: int, base: int) -> Any:
    """The speed-up by each rank: weak scaling where the batch of a rank stays, strong scaling where it shrinks."""
    faster: Cell | None = _speedup(frame, cell, base)
    if faster is None:
        return None
    ranks, others = (int(str(frame.known[known].get("ranks") or 1)) for known in (cell, base))
    ends: tuple[Any, ...] = (faster.value, faster.low, faster.high)
    value, low, high = (None if end is None else end * others / ranks for end in ends)
    return Cell(value, low=low, high=high)


def _memory_change(frame: Frame, cell: int, base: int) -> float | None:
    """By the device's peaks; of runs on a CPU by those predicted for a device, else by resident memory."""
    for name in (
        "memory.run_peak_allocated_bytes", "memory_prediction.peak_allocated_bytes", "memory.host_peak_rss_bytes",
    ):  # fmt: skip
        peak, base_peak = (max(frame.numbers(known, name), default=0) for known in (cell, base))
        if peak and base_peak:
            return peak / base_peak - 1
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
        ("memory_change_fraction", f"memory vs {BASELINE}", _memory_change, _CHANGE),
        ("first_loss_difference", f"first loss - {BASELINE}", _difference("loss.first"), NAT),
        (
            "gradient_norm_difference_fraction", f"gradient norm vs {BASELINE}",
            _difference("warmup.gradient_norm", is_relative=True), _CHANGE,
        ),
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
