"""Columns: what a table or a chart can show of a cell, each with its unit and how it is summarized over runs.

A column has a name of its own, or it is any number of a run's record by its dotted name: then the schema says the rest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

from lmbench.errors import UsageError
from lmbench.precision import find_precision
from lmbench.records.measured import PhaseSummary
from lmbench.records.run import RunRecord
from lmbench.records.schema import SchemaField, fields, value_at
from lmbench.records.statistics import ratio_of, sample_std
from lmbench.records.summary import host_bound_fraction
from lmbench.records.vocabulary import BACKWARD_MODES, Span
from lmbench.report import units
from lmbench.report.cells import Cell, Pairing
from lmbench.report.gather import Sample
from lmbench.report.units import COUNT, GIB, MS, PERCENT, SECONDS, TIMES, Unit

#: Stands in a heading for the baseline's name.
BASELINE = "{baseline}"
#: Facts that change how much one step does.
_STEP_SIZE = ("batch", "context", "micro_batches")
#: Steps at the beginning in which compiling is looked for, where the warm-up is shorter.
_COMPILING_STEPS = 5


@dataclass(frozen=True)
class Measure:
    """A cell's value in SI units with its standard deviation: between processes, or within the only one.

    `low` and `high` are the ends of a 95 % interval, where there is one. `name` is what the value is of, where that is
    another thing in each cell, such as the longest kernel.
    """

    value: float
    std: float | None = None
    low: float | None = None
    high: float | None = None
    name: str = ""


Number = Callable[[RunRecord], float | None]
#: Reads a cell, given its baseline (None where there is none).
Reader = Callable[[Cell, Cell | None], Measure | None]


@dataclass(frozen=True)
class Column:
    """One column.

    `name` is what a view and CSV call it (it ends in its SI unit), `title` what a heading does, without the unit.
    With `has_spread` a standard deviation stands beside the value. `of_run` is the number of one process whose mean is
    the value, where charts show its interval. `is_profiled` says that only profiled runs have it, `is_planned` that it
    is known of a cell of which no run ended well. With `after`, the name of a numeric fact, what it is read against is
    no baseline but the cell with the next smaller value of that. An `in_words` column shows the name of its measure,
    whose value is 0 where that is bad. One that `reads_steps` is looked at only where a view names it.
    """

    name: str
    title: str
    read: Reader
    unit: Unit
    text: Callable[[Measure], str] | None = None
    has_spread: bool = False
    of_run: Number | None = None
    is_profiled: bool = False
    is_planned: bool = False
    after: str = ""
    in_words: bool = False
    reads_steps: bool = False

    def of(self, cell: Cell, pairing: Pairing) -> Measure | None:
        """The cell's value; None of one that did not end well, but for what is known without it."""
        if not cell.ok and not self.is_planned:
            return None
        return self.read(cell, pairing.before(cell, self.after) if self.after else pairing.of(cell))

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.unit.word})" if self.unit.word else self.title

    @property
    def is_relative(self) -> bool:
        return BASELINE in self.title

    def show(self, measure: Measure) -> str:
        """The value in the heading's unit."""
        if self.in_words:
            return measure.name
        if self.text is not None:
            return self.text(measure)
        return units.mean_and_std(measure.value, measure.std) if self.has_spread else self.unit.text(measure.value)


def numbers(cell: Cell, of_run: Number) -> list[float]:
    """A number of each ok run that has it."""
    return [value for sample in cell.ok if (value := of_run(sample.record)) is not None]


def over_runs(of_run: Number, combine: Callable[[Iterable[float]], float] = statistics.fmean) -> Reader:
    """One number a run, combined over runs; the spread is the standard deviation between runs."""

    def read(cell: Cell, _baseline: Cell | None = None) -> Measure | None:
        values = numbers(cell, of_run)
        return Measure(combine(values), sample_std(values, statistics.fmean(values))) if values else None

    return read


def _rate(of_run: Number) -> Reader:
    """Over runs as the row's mean step has it: the mean of rates would be that of another step."""
    return over_runs(of_run, statistics.harmonic_mean)


# what was measured


def mean_of(span: Span) -> Number:
    """A run's mean time of a phase, or of the step."""

    def of_run(run: RunRecord) -> float | None:
        summary = run.phases.get(span)
        return None if summary is None else summary.mean_s

    return of_run


def phase_time(cell: Cell, span: Span = "step", modes: Sequence[str] | None = None) -> Measure | None:
    """Mean time of a phase: over the means of all processes, or within the only one; only where the mode has it."""
    if modes is not None and cell.facts.get("mode") not in modes:
        return None
    means = numbers(cell, mean_of(span))
    if not means:
        return None
    if len(means) > 1:
        return Measure(statistics.fmean(means), sample_std(means, statistics.fmean(means)))
    summaries = [found for sample in cell.ok if (found := sample.record.phases.get(span)) is not None]
    return Measure(means[0], next((found.std_s for found in summaries if found.std_s is not None), None))


def _phase(span: Span, modes: Sequence[str] | None = None) -> Column:
    def of_run(run: RunRecord) -> float | None:
        mode = "inference" if run.command == "validate" else run.mode
        return mean_of(span)(run) if modes is None or mode in modes else None

    return Column(f"{span}_s", span, lambda cell, _: phase_time(cell, span, modes), MS, has_spread=True, of_run=of_run)


def _both_passes(run: RunRecord) -> float | None:
    """Forward and backward together, of a mode that has both."""
    forward, backward = mean_of("forward")(run), mean_of("backward")(run)
    return None if forward is None or backward is None or run.mode not in BACKWARD_MODES else forward + backward


def _waits_by_lag(span: Span) -> Reader:
    """The verdict of the lag probes on a phase, with the smallest lag within it; `mixed` where runs differ."""

    def read(cell: Cell, _baseline: Cell | None) -> Measure | None:
        verdicts = [sample.record.probe.verdicts for sample in cell.ok]
        found = [own for each in verdicts if each is not None and (own := each.get(span)) is not None]
        words = {own.verdict for own in found if own.verdict is not None}
        lags = [own.min_lag_s for own in found if own.min_lag_s is not None]
        if not words:
            return None
        return Measure(statistics.fmean(lags or [math.nan]), name=words.pop() if len(words) == 1 else "mixed")

    return read


def _waits(span: Span) -> Column:
    unit = Unit("", 1e3, units.milliseconds)
    return Column(f"{span}_lag_s", f"{span} is", _waits_by_lag(span), unit, text=lambda measure: measure.name)


def _host_peak(cell: Cell, _baseline: Cell | None) -> Measure | None:
    """Resident memory of the process, where there is no device memory."""
    on_device = [sample for sample in cell.ok if sample.record.device_type != "cpu"]
    return None if on_device else over_runs(lambda run: run.memory.host_peak_rss_bytes, max)(cell, None)


def host_bound(cell: Cell, _baseline: Cell | None = None) -> Measure | None:
    """Share of the step in phases in which the device waited for the host, by the lag probes; mean over runs."""
    return over_runs(host_bound_fraction)(cell, None)


def _skipped(cell: Cell, _baseline: Cell | None) -> Measure | None:
    precision = find_precision(str(cell.facts.get("precision")))
    if precision is None or not precision.has_scaler:
        return None
    return over_runs(lambda run: run.window.skipped_count, math.fsum)(cell, None)


def _first_step(cache_kind: str) -> Reader:
    """First step of the runs that compiled into an empty cache (`private`), or found what an earlier one left."""
    return over_runs(lambda run: run.compile.first_step_s if run.compile.cache == cache_kind else None)


def _of_step(
    read: Callable[[PhaseSummary], float | None], combine: Callable[[Iterable[float]], float] = statistics.fmean
) -> Reader:
    """A statistic of the step, over runs."""
    return over_runs(lambda run: None if run.phases.step is None else read(run.phases.step), combine)


MEASURED: tuple[Column, ...] = (
    Column("step_s", "step", lambda cell, _: phase_time(cell), MS, has_spread=True, of_run=mean_of("step")),
    _phase("data"),
    _phase("transfer"),
    _phase("forward"),
    _phase("backward", BACKWARD_MODES),
    Column(
        "forward_backward_s", "forward + backward", over_runs(_both_passes), MS, has_spread=True, of_run=_both_passes
    ),
    _phase("clip", ("train_step",)),
    _phase("optimizer", ("train_step",)),
    _phase("zero_grad", BACKWARD_MODES),
    _phase("other"),
    Column("step_median_s", "median", _of_step(lambda step: step.median_s), MS),
    Column("step_min_s", "min", _of_step(lambda step: step.min_s, min), MS),
    Column("step_max_s", "max", _of_step(lambda step: step.max_s, max), MS),
    Column("step_cv_fraction", "CV within a run", _of_step(lambda step: step.cv_fraction), PERCENT),
    Column(
        "tokens_per_s", "tokens/s", _rate(lambda run: run.throughput.tokens_per_s), COUNT,
        of_run=lambda run: run.throughput.tokens_per_s,
    ),
    Column(
        "mfu_fraction", "MFU", _rate(lambda run: run.throughput.mfu_fraction), PERCENT,
        of_run=lambda run: run.throughput.mfu_fraction,
    ),
    Column(
        "hfu_fraction", "HFU", _rate(lambda run: run.throughput.hfu_fraction), PERCENT,
        of_run=lambda run: run.throughput.hfu_fraction,
    ),
    Column("host_bound_fraction", "host-bound", host_bound, PERCENT),
    _waits("forward"),
    _waits("backward"),
    Column("peak_bytes", "peak memory", over_runs(lambda run: run.memory.run_peak_allocated_bytes, max), GIB),
    Column("host_peak_bytes", "peak host memory", _host_peak, GIB),
    Column(
        "joules_per_token", "mJ/token", over_runs(lambda run: run.throughput.joules_per_token),
        Unit("", 1e3, lambda value: f"{value * 1e3:.3g}"),
    ),
    Column("first_loss", "first loss", over_runs(lambda run: run.loss.first), Unit("nat", 1.0, "{:.4f}".format)),
    Column("skipped_count", "skipped steps", _skipped, COUNT),
    Column("cold_first_step_s", "cold first step", _first_step("private"), SECONDS),
    Column("warm_first_step_s", "first step, cache kept", _first_step("shared"), SECONDS),
    Column("graph_count", "graphs", over_runs(lambda run: run.compile.graph_count, max), COUNT),
    Column("graph_break_count", "graph breaks", over_runs(lambda run: run.compile.graph_break_count, max), COUNT),
)  # fmt: skip


# against the baseline


def _speedup(cell: Cell, baseline: Cell | None) -> Measure | None:
    """How many times faster, with its interval between processes: by step time, or by tokens/s where the steps are
    not of one size."""
    if baseline is not None and any(cell.facts.get(name) != baseline.facts.get(name) for name in _STEP_SIZE):
        return _ratio(baseline, cell, lambda run: run.throughput.tokens_per_s)
    return _ratio(cell, baseline, mean_of("step"))


def _slowdown(cell: Cell, baseline: Cell | None) -> Measure | None:
    return None if baseline is None else _ratio(baseline, cell, mean_of("step"))


def _ratio(below: Cell, above: Cell | None, of_run: Number) -> Measure | None:
    """`above` over `below`: the ratio of the means that a table shows, with the interval of design section 8."""
    values = numbers(below, of_run)
    others = numbers(above, of_run) if above else []
    if not values or not others or min(*values, *others) <= 0:
        return None
    found = ratio_of(values, others)
    return Measure(statistics.fmean(others) / statistics.fmean(values), low=found.low, high=found.high)


def _predicted_peak(run: RunRecord) -> float | None:
    return run.memory_prediction.peak_allocated_bytes if run.memory_prediction is not None else None


def _memory_saved(cell: Cell, baseline: Cell | None) -> Measure | None:
    """By the device's peaks; of runs on a CPU by those predicted for a device, else by resident memory."""
    peaks: tuple[Number, ...] = (
        lambda run: run.memory.run_peak_allocated_bytes,
        _predicted_peak,
        lambda run: run.memory.host_peak_rss_bytes,
    )
    for peak in peaks:
        values = numbers(cell, peak)
        others = numbers(baseline, peak) if baseline else []
        if values and others and max(others) > 0:
            return Measure(1 - max(values) / max(others))
    return None


def _loss_difference(cell: Cell, baseline: Cell | None) -> Measure | None:
    """Loss of step 0, where weights and data are the same, minus the baseline's."""
    return _difference(_same_seed(cell, baseline), lambda run: run.loss.first)


def _gradient_norm_difference(cell: Cell, baseline: Cell | None) -> Measure | None:
    """Relative difference of the gradient norm at the last warm-up step, which is the same one in both."""
    pair = _same_seed(cell, baseline)
    found, norm = _difference(pair, _gradient_norm), pair and _gradient_norm(pair[1].record)
    return Measure(found.value / norm) if found and norm else None


def _gradient_norm(run: RunRecord) -> float | None:
    return run.warmup.gradient_norm


def _difference(pair: tuple[Sample, Sample] | None, of_run: Number) -> Measure | None:
    own, base = (None, None) if pair is None else (of_run(pair[0].record), of_run(pair[1].record))
    return None if own is None or base is None or not math.isfinite(own - base) else Measure(own - base)


def _same_seed(cell: Cell, baseline: Cell | None) -> tuple[Sample, Sample] | None:
    """The first run of each whose weights and data began alike."""
    for sample in cell.ok:
        own = (*sample.seeds, sample.record.data.source)
        for other in baseline.ok if baseline else ():
            if own == (*other.seeds, other.record.data.source) and None not in own:
                return sample, other
    return None


def _pays_after(cell: Cell, baseline: Cell | None) -> Measure | None:
    """After how many steps compiling into an empty cache has paid; infinite where it never does.

    A run's time after n steps is its excess at the beginning plus n times its steady step; the two lines meet at the
    difference of the excesses divided by that of the steps.
    """
    if baseline is None or not cell.ok or not cell.ok[0].record.compile.is_enabled:
        return None
    cold = [sample for sample in cell.ok if sample.record.compile.cache != "shared"]
    own, base = phase_time(cell), phase_time(baseline)
    excess, usual = _mean_excess(cold), _mean_excess(baseline.ok)
    if own is None or base is None or excess is None or usual is None:
        return None
    gain_s = base.value - own.value
    return Measure(math.inf if gain_s <= 0 else math.ceil(max(0.0, excess - usual) / gain_s))


def _mean_excess(samples: Sequence[Sample]) -> float | None:
    found = [excess for sample in samples if (excess := _excess_s(sample)) is not None]
    return statistics.fmean(found) if found else None


def _excess_s(sample: Sample) -> float | None:
    """What the steps before the steady state took beyond it."""
    step = sample.record.phases.step
    count = max(sample.record.window.warmup_steps or 0, _COMPILING_STEPS)
    steps = [record.step_s for record in sample.first_steps(count) if record.step_s is not None]
    if step is None or step.median_s is None or not steps:
        return None
    return math.fsum(steps) - len(steps) * step.median_s


def _steps_text(measure: Measure) -> str:
    return "never" if math.isinf(measure.value) else f"{measure.value:,.0f} steps"


RELATIVE: tuple[Column, ...] = (
    Column("speedup", f"speed-up vs {BASELINE}", _speedup, TIMES),
    Column("slowdown", f"mean / mean of {BASELINE}", _slowdown, TIMES),
    Column("memory_saved_fraction", f"memory saved vs {BASELINE}", _memory_saved, PERCENT),
    Column("first_loss_difference", f"first loss - {BASELINE}", _loss_difference, Unit("nat", 1.0, units.signed)),
    Column(
        "gradient_norm_difference_fraction", f"gradient norm vs {BASELINE}", _gradient_norm_difference,
        Unit("%", 100.0, lambda value: units.signed(value * 100)),
    ),
    Column("pays_after_steps", f"pays after, vs {BASELINE}", _pays_after, COUNT, _steps_text),
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
    unit = units.unit_of(found.unit)
    last = name.rpartition(".")[2]
    combine: Callable[[Iterable[float]], float] = statistics.fmean
    if last.startswith("max_") or "peak" in name:
        combine = max
    elif last.startswith("min_"):
        combine = min
    of_run: Number = lambda run: value_at(run, name)  # noqa: E731
    return Column(
        name, _title(found), over_runs(of_run, combine), unit,
        of_run=of_run if combine is statistics.fmean else None,
    )  # fmt: skip


def _title(found: SchemaField) -> str:
    """The field's title, after the phase or the end of the window that it is of where the title does not say it."""
    parts = zip_longest(found.name.split("."), found.pattern.split("."))
    whose = [name for name, pattern in parts if pattern != name and name not in found.title.split()]
    return " ".join([*whose, found.title])
