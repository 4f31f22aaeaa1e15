"""What attention by itself adds to a report: rates of its passes, their growth with length, bytes saved and refused."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache
from itertools import pairwise
from statistics import fmean
from typing import Any

from lmbench.records.load import Run
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import BACKWARD_MODES, Span
from lmbench.report import units
from lmbench.report.columns import Column, per_cell
from lmbench.report.facts import CONSEQUENCES
from lmbench.report.frame import Frame
from lmbench.report.units import GIB, PERCENT, Unit
from lmbench.report.view import Feature

_RATE = Unit("TFLOP/s", 1e-12, lambda value: units.plain(value * 1e-12))
_RATIO = Unit("", 1.0, "{:.2f}".format)

#: The allocator rounds what it asks the device for up to this (c10/cuda/CUDACachingAllocator.h, kRoundLarge).
_ROUNDING_BYTES = 2 * 2**20


@lru_cache(maxsize=4)
def _growths(frame: Frame, span: Span) -> dict[int, float]:
    numbers, lines = frame.numbers(f"phases.{span}.mean_s"), defaultdict[Any, list[Any]](list)
    times = {cell: fmean(values) for cell, values in numbers.items()}
    for cell, known in frame.known.items():
        if "context" in known and "head_dim" in known and times.get(cell, 0) > 0:
            others = {(n, v) for n, v in known.items() if n != "context" and n not in CONSEQUENCES}
            lines[frozenset(others)].append((known["context"], cell))
    return {
        cell: math.log(times[cell] / times[before]) / math.log(longer / shorter)
        for line in lines.values()
        for (shorter, before), (longer, cell) in pairwise(sorted(line))
    }


def _columns(span: Span) -> tuple[Column, ...]:
    modes = BACKWARD_MODES if span == "backward" else ()
    # Forward passes' worth of FLOPs: backward has two products for each product of forward.
    work = 2 if span == "backward" else 1

    def rate(run: RunRecord) -> float | None:
        """FLOP/s by the FLOPs that the pass needs: of a causal one half of the products, whoever does them all."""
        flops, data, summary = run.flops, run.data, run.phases.get(span)
        per_token = flops.causal_per_token_flops if run.model.is_causal else flops.per_token_flops
        if modes and run.mode not in modes:
            return None
        if run.model.head_dim is None or not per_token or not flops.multiplier or not summary or not summary.mean_s:
            return None
        tokens = (data.batch_size or 0) * (data.context_length or 0)
        return work * per_token / flops.multiplier * tokens / summary.mean_s or None

    def share(run: RunRecord) -> float | None:
        flops_per_s, peak = rate(run), run.flops.peak_flops_per_s
        return flops_per_s / peak if flops_per_s and peak else None

    def growth(frame: Frame, cell: int) -> float | None:
        """The power of the context with which the pass's time grows, from the next shorter one: 2 is quadratic."""
        return _growths(frame, span).get(cell) if not modes or frame.known[cell].get("mode") in modes else None

    return (
        Column(f"{span}_flops_per_s", span, rate, _RATE),
        Column(f"{span}_mfu_fraction", f"{span}, of peak", share, PERCENT),
        Column(f"{span}_growth_exponent", f"{span} ~ context^", growth, _RATIO, None),
    )


def _saved_ratio(run: RunRecord) -> float | None:
    saved, expected = run.memory.saved_bytes, run.memory.expected_saved_bytes
    return None if saved is None or not expected else saved / expected


def _refused_bytes(run: Run) -> int | None:
    """What a run of attention by itself that ran out of memory asked for last."""
    refused, error = run.record.memory.refused, run.record.error
    if run.outcome != "oom" or run.record.model.head_dim is None:
        return None
    return (refused.requested_bytes if refused else None) or (error.requested_bytes if error else None)


def _about(frame: Frame, cell: int) -> list[str]:
    """What PyTorch took for plain `sdpa`, or what a row's lack of memory was for."""
    known, runs = frame.known[cell], frame.runs_of(cell)
    backends = dict.fromkeys(run.record.model.attention_backend for run in frame.runs_of(cell, "ok"))
    notes = [f"PyTorch took {backend} for {known.get('attention')}" for backend in backends if backend is not None]
    asked = next((asked for run in runs if (asked := _refused_bytes(run)) is not None), None)
    if cell in frame.ok or asked is None:
        return notes
    sizes = [known.get(name) for name in ("batch", "heads", "context", "context")]
    count = math.prod(size if isinstance(size, int) else 0 for size in sizes)
    tensor = "".join(
        f": one batch x heads x context x context tensor of {element_bytes} B an element"
        for element_bytes in (4, 2)
        if count and 0 <= asked - count * element_bytes < _ROUNDING_BYTES
    )
    memory = runs[0].record.memory
    held = memory.refused.allocated_bytes if memory.refused else memory.run_peak_allocated_bytes
    total = units.gib(memory.device_total_bytes)
    return [f"{units.gib(asked)} more were asked for{tensor}; {units.gib(held)} were held of {total}"]


ATTENTION = Feature(
    columns=(
        *_columns("forward"),
        *_columns("backward"),
        # What the shape makes a forward pass save: a run that ran out of memory tells it too.
        Column(
            "saved_by_shape_bytes", "saved by shape",
            per_cell(lambda run: run.record.memory.expected_saved_bytes, outcome=None), GIB, None,
        ),
        Column("saved_ratio", "saved / by shape", _saved_ratio, _RATIO),
        Column("refused_bytes", "refused", per_cell(_refused_bytes, outcome=None), GIB, None),
    ),
    row_notes=_about,
)  # fmt: skip
