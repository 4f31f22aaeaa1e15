"""Columns: what a table or a chart can show of a cell, each with its unit and how it is summarized over runs.

A column has a name of its own, or it is any number of a run's record by its dotted name: then the schema says the rest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice, zip_longest
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
from lmbench.records.vocabulary import BACKWARD_MODES, Span
from lmbench.report import answer, units
from lmbench.report.answer import Cell
from lmbench.report.frame import Expression, Frame
from lmbench.report.units import COUNT, GIB, MS, PERCENT, SECONDS, TIMES, Unit

#: Stands in a title for the baseline's name.
BASELINE = "{baseline}"
#: Facts that change how much one step does.
_STEP_SIZE = ("batch", "context", "micro_batches")
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
    function of the frame that gives a cell of an answer for each cell.

    Args:
        within: the field that is the spread of a lone process, empty where it has none; None where no standard
            deviation stands beside the value.
        modes: the modes that have this number, all where empty.
        is_profiled: whether only profiled runs have it.
        is_planned: whether it is known of a cell of which no run ended well.
        in_words: whether words stand for the number, which is 0 where they say something bad.
        reads_steps: whether it reads steps.jsonl, and is worked out only where a view names it.
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
    in_words: bool = False
    reads_steps: bool = False

    @property
    def is_of_one_process(self) -> bool:
        """Whether the value is a mean of numbers of processes, so that it has an interval between them."""
        return self.over in ("mean", harmonic)

    @property
    def is_relative(self) -> bool:
        return BASELINE in self.title

    def numbers(self, frame: Frame) -> pd.Series:
        """A number of each ok run that has it, by its cell."""
        numbers = frame.numbers(self.expression)
        if not self.modes:
            return numbers
        return numbers[[frame.known[cell].get("mode") in self.modes for cell in numbers.index]]

    def of(self, frame: Frame) -> dict[int, Cell]:
        """The cells that have a value, with it; of one that did not end well only what is known without that."""
        if self.over is None:
            cells = dict(self.expression(frame))
        else:
            numbers = self.numbers(frame)
            by_cell = numbers.groupby(level=0)
            table = pd.DataFrame({"value": by_cell.agg(self.over) if len(numbers) else numbers, "std": float("nan")})
            if self.within is not None:
                table["std"] = by_cell.std()
            if self.within:
                lone = frame.numbers(self.within).groupby(level=0).first()
                table["std"] = table["std"].where(by_cell.size() > 1, lone)
            table = table.astype(object).where(table.notna(), None)
            cells = {cell: Cell(value, std) for cell, value, std in table.itertuples()}
        return {cell: found for cell, found in cells.items() if self.is_planned or cell in frame.ok_cells}

    def heading(self, frame: Frame) -> answer.Column:
        """The column as a table has it."""
        title = self.title.replace(BASELINE, frame.base_name)
        return answer.Column(title, units.WORDS if self.in_words else self.unit, self.name)

    def text(self, cell: Cell) -> str:
        """A value in the heading's unit."""
        return answer.text_of(cell, self.unit)


def per_cell(
    read: Callable[[Run], Any], *, is_shown: bool | None = True, outcome: str | None = "ok"
) -> Callable[[Frame], Mapping[int, Cell]]:
    """For each cell what its first run tells that tells anything: a number, or a cell of an answer."""

    def of(frame: Frame) -> dict[int, Cell]:
        cells = {}
        for cell in frame.facts.index:
            told = map(read, frame.runs_of(cell, outcome, is_shown))
            value = next((each for each in told if each is not None), None)
            if value is not None:
                cells[cell] = value if isinstance(value, Cell) else Cell(value)
        return cells

    return of


def _phase(span: Span, modes: Sequence[str] = ()) -> Column:
    return Column(f"{span}_s", span, f"phases.{span}.mean_s", MS, within=f"phases.{span}.std_s", modes=modes)


def _waits(span: Span) -> Column:
    """The verdict of the lag probes on a phase, with the smallest lag within it; `mixed` where runs differ."""

    def of(frame: Frame) -> dict[int, Cell]:
        cells = {}
        for cell in frame.ok_cells:
            found = [run.record.probe.verdicts for run in frame.runs_of(cell, "ok")]
            verdicts = [verdict for each in found if each is not None and (verdict := each.get(span)) is not None]
            words = {each.verdict for each in verdicts if each.verdict is not None}
            lags = [each.min_lag_s for each in verdicts if each.min_lag_s is not None]
            if words:
                text = words.pop() if len(words) == 1 else "mixed"
                cells[cell] = Cell(statistics.fmean(lags) if lags else None, text=text)
        return cells

    return Column(f"{span}_lag_s", f"{span} is", of, Unit("", 1e3, units.milliseconds), None)


def _skipped(run: RunRecord) -> float | None:
    precision = find_precision(str(run.precision))
    return run.window.skipped_count if precision is not None and precision.has_scaler else None


def _first_step(cache_kind: str) -> Expression:
    """First step of the runs that compiled into an empty cache (`private`), or with what an earlier run left."""
    return lambda run: run.compile.first_step_s if run.compile.cache == cache_kind else None


STEP = _phase("step")
#: Share of the step in phases in which the device waited for the host, by the lag probes.
HOST_BOUND = Column("host_bound_fraction", "host-bound", host_bound_fraction, PERCENT)

MEASURED: tuple[Column, ...] = (
    STEP,
    _phase("data"),
    _phase("transfer"),
    _phase("forward"),
    _phase("backward", BACKWARD_MODES),
    Column(
        "forward_backward_s", "forward + backward", "phases.forward.mean_s + phases.backward.mean_s", MS,
        within="", modes=BACKWARD_MODES,
    ),
    _phase("clip", ("train_step",)),
    _phase("optimizer", ("train_step",)),
    _phase("zero_grad", BACKWARD_MODES),
    _phase("other"),
    Column("step_median_s", "median", "phases.step.median_s", MS),
    Column("step_min_s", "min", "phases.step.min_s", MS, "min"),
    Column("step_max_s", "max", "phases.step.max_s", MS, "max"),
    Column("step_cv_fraction", "CV within a run", "phases.step.cv_fraction", PERCENT),
    Column("tokens_per_s", "tokens/s", "throughput.tokens_per_s", COUNT, harmonic),
    Column("mfu_fraction", "MFU", "throughput.mfu_fraction", PERCENT, harmonic),
    Column("hfu_fraction", "HFU", "throughput.hfu_fraction", PERCENT, harmonic),
    HOST_BOUND,
    _waits("forward"),
    _waits("backward"),
    Column("peak_bytes", "peak memory", "memory.run_peak_allocated_bytes", GIB, "max"),
    Column(
        "host_peak_bytes", "peak host memory",
        lambda run: run.memory.host_peak_rss_bytes if run.device_type == "cpu" else None, GIB, "max",
    ),
    Column(
        "joules_per_token", "mJ/token", "throughput.joules_per_token", Unit("", 1e3, lambda value: f"{value * 1e3:.3g}")
    ),
    Column("first_loss", "first loss", "loss.first", Unit("nat", 1.0, "{:.4f}".format)),
    Column("skipped_count", "skipped steps", _skipped, COUNT, "sum"),
    Column("cold_first_step_s", "cold first step", _first_step("private"), SECONDS),
    Column("warm_first_step_s", "first step, cache kept", _first_step("shared"), SECONDS),
    Column("graph_count", "graphs", "compile.graph_count", COUNT, "max"),
    Column("graph_break_count", "graph breaks", "compile.graph_break_count", COUNT, "max"),
)  # fmt: skip


# against the baseline


def _of_pairs(read: Callable[[Frame, int, int], Cell | float | None]) -> Callable[[Frame], Mapping[int, Cell]]:
    """What is read of each cell beside its baseline."""

    def of(frame: Frame) -> dict[int, Cell]:
        pairs = ((cell, read(frame, cell, base)) for cell, base in frame.base.items() if cell in frame.known)
        return {cell: x if isinstance(x, Cell) else Cell(x) for cell, x in pairs if x is not None}

    return of


def ratio(below: Sequence[float], above: Sequence[float]) -> Cell | None:
    """The ratio of two means of processes with its 95 % interval, by Welch's t on logarithms."""
    if not len(below) or not len(above) or min(*below, *above) <= 0:
        return None
    interval = ratio_of(below, above)
    return Cell(statistics.fmean(above) / statistics.fmean(below), low=interval.low, high=interval.high)


def values_of(numbers: pd.Series, cell: int) -> list[float]:
    return list(numbers[[cell]]) if cell in numbers.index else []


def _ratio(frame: Frame, below: int, above: int, expression: str) -> Cell | None:
    numbers = frame.numbers(expression)
    return ratio(values_of(numbers, below), values_of(numbers, above))


def _speedup(frame: Frame, cell: int, base: int) -> Cell | None:
    """How many times faster: by step time, or by tokens/s where the steps are not of one size."""
    if any(frame.known[cell].get(name) != frame.known[base].get(name) for name in _STEP_SIZE):
        return _ratio(frame, base, cell, "throughput.tokens_per_s")
    return _ratio(frame, cell, base, "phases.step.mean_s")


def _slowdown(frame: Frame, cell: int, base: int) -> Cell | None:
    return _ratio(frame, base, cell, "phases.step.mean_s")


def _memory_saved(frame: Frame, cell: int, base: int) -> float | None:
    """By the device's peaks; of runs on a CPU by those predicted for a device, else by resident memory."""
    peaks = (
        "memory.run_peak_allocated_bytes",
        "memory_prediction.peak_allocated_bytes",
        "memory.host_peak_rss_bytes",
    )
    for peak in peaks:
        numbers = frame.numbers(peak)
        values, others = values_of(numbers, cell), values_of(numbers, base)
        if values and others and max(others) > 0:
            return 1 - max(values) / max(others)
    return None


def _difference(field: str, is_relative: bool = False) -> Callable[[Frame, int, int], float | None]:
    """A number minus the baseline's, of two runs whose weights and data began alike."""

    def of(frame: Frame, cell: int, base: int) -> float | None:
        own, other = frame.by_seed(cell), frame.by_seed(base)
        pair = next(((run, other[seed]) for seed, run in own.items() if seed in other), None)
        values = [value_at(run.record, field) for run in pair or ()]
        if not values or None in values or not math.isfinite(values[0] - values[1]):
            return None
        difference = values[0] - values[1]
        return (difference / values[1] if values[1] else None) if is_relative else difference

    return of


def _pays_after(frame: Frame, cell: int, base: int) -> Cell | None:
    """After how many steps compiling into an empty cache has paid; infinite where it never does.

    A run's time after n steps is its excess at the beginning plus n times its steady step; the two lines meet at the
    difference of the excesses divided by that of the steps.
    """
    own = frame.runs_of(cell, "ok")
    if not own or not own[0].record.compile.is_enabled:
        return None
    cold = _mean_excess_s(run for run in own if run.record.compile.cache != "shared")
    usual = _mean_excess_s(frame.runs_of(base, "ok"))
    means = [values_of(frame.numbers("phases.step.mean_s"), each) for each in (cell, base)]
    if cold is None or usual is None or not all(means):
        return None
    gain_s = statistics.fmean(means[1]) - statistics.fmean(means[0])
    if gain_s <= 0:
        return Cell(math.inf, text="never")
    steps = math.ceil(max(0.0, cold - usual) / gain_s)
    return Cell(steps, text=f"{steps:,} steps")


def _mean_excess_s(runs: Iterable[Run]) -> float | None:
    """How much longer than steady ones the first steps of runs took in all."""
    excesses = []
    for run in runs:
        step, count = run.record.phases.step, max(run.record.window.warmup_steps or 0, _COMPILING_STEPS)
        times = [record.step_s for record in first_steps(run, count) if record.step_s is not None]
        if step is not None and step.median_s is not None and times:
            excesses.append(math.fsum(times) - len(times) * step.median_s)
    return statistics.fmean(excesses) if excesses else None


def first_steps(run: Run, count: int) -> list[StepRecord]:
    """A run's first step records, warm-up included; of a torn or missing file those before the tear."""
    records: list[StepRecord] = []
    with suppress(Unreadable):
        for _, step in islice(read_steps(run.path / STEPS_FILE), count):
            if step is None:
                break
            records.append(step)
    return records


_SIGNED_PERCENT = Unit("%", 100.0, lambda value: units.signed(value * 100))

RELATIVE: tuple[Column, ...] = tuple(
    Column(name, title, _of_pairs(read), unit, None)
    for name, title, read, unit in (
        ("speedup", f"speed-up vs {BASELINE}", _speedup, TIMES),
        ("slowdown", f"mean / mean of {BASELINE}", _slowdown, TIMES),
        ("memory_saved_fraction", f"memory saved vs {BASELINE}", _memory_saved, PERCENT),
        (
            "first_loss_difference", f"first loss - {BASELINE}", _difference("loss.first"),
            Unit("nat", 1.0, units.signed),
        ),
        (
            "gradient_norm_difference_fraction", f"gradient norm vs {BASELINE}",
            _difference("warmup.gradient_norm", is_relative=True), _SIGNED_PERCENT,
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
    found = fields("run").get(name)
    if found is None:
        return None
    if not found.about.is_number:
        raise UsageError(f"column {name!r} is {'a ' * (found.unit != 'text')}{found.unit}; a column shows a number")
    last = name.rpartition(".")[2]
    over = "max" if last.startswith("max_") or "peak" in name else "min" if last.startswith("min_") else "mean"
    # The phase or the end of the window that it is of, where the title does not say it.
    parts = zip_longest(found.name.split("."), found.pattern.split("."))
    whose = [part for part, pattern in parts if pattern != part and part and part not in found.title.split()]
    return Column(name, " ".join([*whose, found.title]), name, units.unit_of(found.unit), over)
