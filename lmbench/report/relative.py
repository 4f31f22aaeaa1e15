"""Columns that compare a cell with its baseline, and how that baseline is found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmbench.errors import UsageError
from lmbench.kernels.shown.columns import KERNELS
from lmbench.records.paths import lookup
from lmbench.records.welch import ratio_of
from lmbench.report import units
from lmbench.report.cells import Cell
from lmbench.report.columns import BASELINE, MEASURED, Column, Measure, numbers, phase_time
from lmbench.report.facts import FACT, Value, captioned, is_consequence, plain
from lmbench.report.sample import Sample

#: Facts that change how much one step does.
_STEP_SIZE = ("batch", "context", "micro_batches")

#: Steps at the beginning in which compiling is looked for, where the warm-up is shorter.
_COMPILING_STEPS = 5


@dataclass(frozen=True)
class Baseline:
    """What a row is compared with: the row whose facts are the same but for these."""

    facts: Mapping[str, Value]
    name: str

    def is_met_by(self, cell: Cell) -> bool:
        return all(cell.facts.get(name) == value for name, value in self.facts.items())


class Pairing:
    """Finds each cell's baseline among the cells; a cell that is one is its own."""

    def __init__(self, baseline: Baseline | None, cells: Sequence[Cell]) -> None:
        self.baseline = baseline
        self._candidates = [cell for cell in cells if baseline and baseline.is_met_by(cell)]
        self._exact = {_identity(cell, cell.facts): cell for cell in reversed(self._candidates)}

    def of(self, cell: Cell) -> Cell | None:
        """The baseline of a cell, None where none fits."""
        if self.baseline is None:
            return None
        wanted = {**cell.facts, **self.baseline.facts}
        found = self._exact.get(_identity(cell, wanted))
        return found or next((other for other in self._candidates if _fits(cell, wanted, other)), None)


def _identity(cell: Cell, facts: Mapping[str, Value]) -> tuple[object, ...]:
    return (cell.gpu, *sorted((name, str(value)) for name, value in facts.items() if not is_consequence(name)))


def _fits(cell: Cell, wanted: Mapping[str, Value], other: Cell) -> bool:
    names = [name for name in {*wanted, *other.facts} if not is_consequence(name)]
    return other.gpu == cell.gpu and all(_agree(wanted.get(name), other.facts.get(name)) for name in names)


def _agree(wanted: Value, found: Value) -> bool:
    # A run that died early cannot tell everything.
    return wanted is None or found is None or wanted == found


def parse_baseline(text: str, cells: Sequence[Cell]) -> Baseline:
    """A baseline from `precision=32-true,matmul=highest`; a value may be the beginning of the one meant.

    Raises:
        UsageError: no `fact=value`, a fact that no cell has, or a value that none of them has.
    """
    facts: dict[str, Value] = {}
    known = sorted({name for cell in cells for name in cell.facts}, key=lambda n: (n not in FACT, n))
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise UsageError(f"baseline {part.strip()!r}; give fact=value, such as precision=32-true,matmul=highest")
        if name not in known:
            raise UsageError(f"baseline fact {name!r} is unknown here; choose among {', '.join(known)}")
        facts[name] = _value_of(name, value, cells)
    return Baseline(facts, ", ".join(captioned(name, value) for name, value in facts.items()))


def _value_of(name: str, text: str, cells: Sequence[Cell]) -> Value:
    values = {str(cell.facts[name]): cell.facts[name] for cell in cells if cell.facts.get(name) is not None}
    begun = [value for shown, value in values.items() if shown.startswith(text)]
    if text in values:
        return plain(values[text])
    if len(begun) == 1:
        return begun[0]
    raise UsageError(f"baseline {name}={text}: no run has it; choose among {', '.join(sorted(values))}")


def _speedup(cell: Cell, baseline: Cell | None) -> Measure | None:
    """How many times faster, with its interval between processes: by step time, or by tokens/s where the steps are
    not of one size."""
    if baseline is not None and any(cell.facts.get(name) != baseline.facts.get(name) for name in _STEP_SIZE):
        return _time_ratio(baseline, cell, "throughput.tokens_per_s")
    return _time_ratio(cell, baseline, "phases.step.mean_s")


def _slowdown(cell: Cell, baseline: Cell | None) -> Measure | None:
    return None if baseline is None else _time_ratio(baseline, cell, "phases.step.mean_s")


def _time_ratio(below: Cell, above: Cell | None, path: str) -> Measure | None:
    """`above` over `below`: the ratio of the means that a table shows, with the interval of design section 8."""
    values = numbers(below, path)
    others = numbers(above, path) if above else []
    if not values or not others or min(*values, *others) <= 0:
        return None
    found = ratio_of(values, others)
    return Measure(statistics.fmean(others) / statistics.fmean(values), low=found.low, high=found.high)


def _memory_saved(cell: Cell, baseline: Cell | None) -> Measure | None:
    for path in ("memory.run_peak_allocated_bytes", "memory.host_peak_rss_bytes"):
        values = numbers(cell, path)
        others = numbers(baseline, path) if baseline else []
        if values and others and max(others) > 0:
            return Measure(1 - max(values) / max(others))
    return None


def _loss_difference(cell: Cell, baseline: Cell | None) -> Measure | None:
    """Loss of step 0, where weights and data are the same, minus the baseline's."""
    pair = _same_seed(cell, baseline)
    return _difference(pair, "loss.first") if pair else None


def _gradient_norm_difference(cell: Cell, baseline: Cell | None) -> Measure | None:
    """Relative difference of the gradient norm at the last warm-up step, which is the same one in both."""
    pair = _same_seed(cell, baseline)
    if pair is None:
        return None
    found, norm = _difference(pair, "warmup.gradient_norm"), pair[1].number("warmup.gradient_norm")
    return Measure(found.value / norm) if found and norm else None


def _difference(pair: tuple[Sample, Sample], path: str) -> Measure | None:
    own, base = pair[0].number(path), pair[1].number(path)
    return None if own is None or base is None or not math.isfinite(own - base) else Measure(own - base)


def _same_seed(cell: Cell, baseline: Cell | None) -> tuple[Sample, Sample] | None:
    """The first run of each whose weights and data began alike."""
    for sample in cell.ok:
        for other in baseline.ok if baseline else ():
            if _beginning(sample) == _beginning(other) and None not in _beginning(sample):
                return sample, other
    return None


def _beginning(sample: Sample) -> tuple[object, ...]:
    seeds = sample.record.get("seeds") or (None, None)
    return (*seeds, lookup(sample.record, "data.source"))


def _pays_after(cell: Cell, baseline: Cell | None) -> Measure | None:
    """After how many steps compiling into an empty cache has paid; infinite where it never does.

    A run's time after n steps is its excess at the beginning plus n times its steady step; the two lines meet at the
    difference of the excesses divided by that of the steps.
    """
    if baseline is None or lookup(cell.ok[0].record if cell.ok else {}, "compile.is_enabled") is not True:
        return None
    cold = [sample for sample in cell.ok if lookup(sample.record, "compile.cache") != "shared"]
    own, base = phase_time("step")(cell), phase_time("step")(baseline)
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
    steady = sample.number("phases.step.median_s")
    count = max(int(sample.number("window.warmup_steps") or 0), _COMPILING_STEPS)
    steps = [record["step_s"] for record in sample.first_steps(count) if record.get("step_s") is not None]
    if steady is None or not steps:
        return None
    return math.fsum(steps) - len(steps) * steady


def _steps_text(measure: Measure) -> str:
    return "never" if math.isinf(measure.value) else f"{measure.value:,.0f} steps"


def _signed_percent(measure: Measure) -> str:
    return "0" if measure.value == 0 else f"{measure.value * 100:+.2g}"


RELATIVE: tuple[Column, ...] = (
    Column("speedup", f"speed-up vs {BASELINE}", _speedup, lambda m: units.times(m.value)),
    Column("slowdown", f"mean / mean of {BASELINE}", _slowdown, lambda m: units.times(m.value)),
    Column("memory_saved_fraction", f"memory saved vs {BASELINE} (%)", _memory_saved, lambda m: f"{m.value * 100:.1f}"),
    Column(
        "first_loss_difference", f"first loss - {BASELINE} (nat)", _loss_difference, lambda m: units.signed(m.value)
    ),
    Column(
        "gradient_norm_difference_fraction", f"gradient norm vs {BASELINE} (%)", _gradient_norm_difference,
        _signed_percent,
    ),
    Column("pays_after_steps", f"pays after, vs {BASELINE}", _pays_after, _steps_text),
)  # fmt: skip

COLUMN: Mapping[str, Column] = {column.name: column for column in (*MEASURED, *RELATIVE, *KERNELS)}
