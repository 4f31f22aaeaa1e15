"""What attention by itself adds to a report: rates of its passes, their growth with length, bytes saved and refused."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lmbench.records.measured import Memory
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import BACKWARD_MODES, Span
from lmbench.report import units
from lmbench.report.cells import Cell
from lmbench.report.columns import Column, Measure, Number, Reader, over_runs, phase_time
from lmbench.report.feature import Feature
from lmbench.report.units import GIB, PERCENT, Unit

#: Forward passes' worth of FLOPs in each pass: backward has two products for each one of forward.
_WORK: Mapping[Span, int] = {"forward": 1, "backward": 2}
_RATE = Unit("TFLOP/s", 1e-12, lambda value: units.plain(value * 1e-12))
_RATIO = Unit("", 1.0, "{:.2f}".format)

#: The allocator rounds what it asks the device for up to this (c10/cuda/CUDACachingAllocator.h, kRoundLarge).
_ROUNDING_BYTES = 2 * 2**20


def _rate(span: Span) -> Number:
    """FLOP/s of a pass by the FLOPs that it needs: of a causal one half of the products, whoever does them all."""

    def of_run(run: RunRecord) -> float | None:
        flops, data, summary = run.flops, run.data, run.phases.get(span)
        per_token = flops.causal_per_token_flops if run.model.is_causal else flops.per_token_flops
        if run.model.head_dim is None or not per_token or not flops.multiplier or summary is None or not summary.mean_s:
            return None
        if data.batch_size is None or data.context_length is None:
            return None
        if span == "backward" and run.mode not in BACKWARD_MODES:
            return None
        work = _WORK[span] * per_token / flops.multiplier * data.batch_size * data.context_length
        return work / summary.mean_s

    return of_run


def _of_peak(span: Span) -> Number:
    rate = _rate(span)

    def of_run(run: RunRecord) -> float | None:
        own, peak = rate(run), run.flops.peak_flops_per_s
        return own / peak if own and peak else None

    return of_run


def _growth(span: Span) -> Reader:
    """The power of the context with which a pass's time grows, from the next shorter one: 2 is quadratic."""

    def read(cell: Cell, shorter: Cell | None) -> Measure | None:
        modes = BACKWARD_MODES if span == "backward" else None
        own = phase_time(cell, span, modes)
        before = phase_time(shorter, span, modes) if shorter is not None else None
        if cell.facts.get("head_dim") is None or own is None or before is None or min(own.value, before.value) <= 0:
            return None
        contexts = float(str(cell.facts["context"])) / float(str(shorter and shorter.facts["context"]))
        return Measure(math.log(own.value / before.value) / math.log(contexts))

    return read


def _saved_by_shape(cell: Cell, _baseline: Cell | None) -> Measure | None:
    """What the shape makes a forward pass save, of any run: one that ran out of memory tells it too."""
    told = (sample.record.memory.expected_saved_bytes for sample in cell.samples)
    return next((Measure(size_bytes) for size_bytes in told if size_bytes is not None), None)


def _saved_ratio(run: RunRecord) -> float | None:
    saved, expected = run.memory.saved_bytes, run.memory.expected_saved_bytes
    return saved / expected if saved is not None and expected else None


def _refused_bytes(cell: Cell) -> int | None:
    """What a run that ran out of memory asked for last."""
    for sample in cell.samples:
        record = sample.record
        if sample.outcome == "oom" and cell.facts.get("head_dim") is not None:
            told = (record.memory.refused, record.error)
            return next((asked for each in told if each is not None and (asked := each.requested_bytes)), None)
    return None


def _refused(cell: Cell, _baseline: Cell | None) -> Measure | None:
    found = _refused_bytes(cell)
    return None if found is None else Measure(found)


def _about(cell: Cell) -> list[str]:
    """What PyTorch took for plain `sdpa`, or what a row's lack of memory was for."""
    taken = dict.fromkeys(sample.record.model.attention_backend for sample in cell.ok)
    found = [f"PyTorch took {backend} for {cell.facts.get('attention')}" for backend in taken if backend is not None]
    asked = _refused_bytes(cell)
    if cell.ok or asked is None:
        return found
    text, element_bytes = f"{units.gib(asked)} more were asked for", _element_of_scores(cell, asked)
    if element_bytes is not None:
        text += f": one batch x heads x context x context tensor of {element_bytes} B an element"
    return [f"{text}; {_held(cell.samples[0].record.memory)}"]


def _element_of_scores(cell: Cell, size_bytes: int) -> int | None:
    """The bytes of an element, where an allocation is one tensor of the scores; None where it is not."""
    count = 1
    for name in ("batch", "heads", "context", "context"):
        value = cell.facts.get(name)
        count *= value if isinstance(value, int) else 0
    return next((each for each in (4, 2) if count and 0 <= size_bytes - count * each < _ROUNDING_BYTES), None)


def _held(memory: Memory) -> str:
    held = memory.refused.allocated_bytes if memory.refused else memory.run_peak_allocated_bytes
    return f"{units.gib(held)} were held of {units.gib(memory.device_total_bytes)}"


def _columns(span: Span) -> tuple[Column, ...]:
    return (
        Column(f"{span}_flops_per_s", span, over_runs(_rate(span)), _RATE, of_run=_rate(span)),
        Column(f"{span}_mfu_fraction", f"{span}, of peak", over_runs(_of_peak(span)), PERCENT, of_run=_of_peak(span)),
        Column(f"{span}_growth_exponent", f"{span} ~ context^", _growth(span), _RATIO, after="context"),
    )


ATTENTION = Feature(
    columns=(
        *_columns("forward"),
        *_columns("backward"),
        Column("saved_by_shape_bytes", "saved by shape", _saved_by_shape, GIB, is_planned=True),
        Column("saved_ratio", "saved / by shape", over_runs(_saved_ratio), _RATIO, of_run=_saved_ratio),
        Column("refused_bytes", "refused", _refused, GIB, is_planned=True),
    ),
    row_notes=_about,
)
