"""What attention by itself adds to a report: rates of its passes, and bytes saved."""

from __future__ import annotations

from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import BACKWARD_MODES, Span
from lmbench.report import units
from lmbench.report.columns import Column, per_cell
from lmbench.report.frame import Frame
from lmbench.report.units import GIB, PERCENT, Unit
from lmbench.report.view import Feature

_RATE = Unit("TFLOP/s", 1e-12, lambda value: units.plain(value * 1e-12))


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

    return (
        Column(f"{span}_flops_per_s", span, rate, _RATE),
        Column(f"{span}_mfu_fraction", f"{span}, of peak", share, PERCENT),
    )


def _about(frame: Frame, cell: int) -> list[str]:
    """What PyTorch took for plain `sdpa`."""
    backends = dict.fromkeys(run.record.model.attention_backend for run in frame.runs_of(cell, "ok"))
    attention = frame.known[cell].get("attention")
    return [f"PyTorch took {backend} for {attention}" for backend in backends if backend is not None]


ATTENTION = Feature(
    columns=(
        *_columns("forward"),
        *_columns("backward"),
        # What the shape makes a forward pass save: a run that ran out of memory tells it too.
        Column(
            "saved_by_shape_bytes", "saved by shape",
            per_cell(lambda run: run.record.memory.expected_saved_bytes, outcome=None), GIB, None,
        ),
    ),
    row_notes=_about,
)  # fmt: skip
