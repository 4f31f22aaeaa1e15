"""Columns and notes that attention alone adds to a report: rates of its passes, and saved bytes."""

from __future__ import annotations

from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import BACKWARD_MODES, Span
from lmbench.report import units
from lmbench.report.columns import Quantity
from lmbench.report.frame import MeasuredCell
from lmbench.report.units import GIB, PERCENT, Unit
from lmbench.report.view import Feature

_RATE = Unit(lambda value: units.plain(value * 1e-12), "TFLOP/s", 1e-12)


def _columns(span: Span) -> tuple[Quantity, ...]:
    is_backward = span == "backward"
    # FLOPs in forward passes: the backward pass has two products for each product of the forward pass.
    passes = 2 if is_backward else 1

    def rate(run: RunRecord) -> float | None:
        """FLOP/s by the FLOPs that the pass needs: half of the products where causal, even if a kernel does all."""
        flops, data, summary = run.flops, run.data, run.phases.get(span)
        per_token = flops.causal_per_token_flops if run.model.is_causal else flops.per_token_flops
        if is_backward and run.mode not in BACKWARD_MODES:
            return None
        if run.model.head_dim is None or not per_token or not flops.multiplier or not summary or not summary.mean_s:
            return None
        tokens = (data.batch_size or 0) * (data.context_length or 0)
        return passes * per_token / flops.multiplier * tokens / summary.mean_s or None

    def share(run: RunRecord) -> float | None:
        flops_per_s, peak = rate(run), run.flops.peak_flops_per_s
        return flops_per_s / peak if flops_per_s and peak else None

    return (
        Quantity(f"{span}_flops_per_s", span, rate, _RATE, "harmonic mean"),
        Quantity(f"{span}_mfu_fraction", f"{span}, of peak", share, PERCENT, "harmonic mean"),
    )


def _about(cell: MeasuredCell) -> list[str]:
    """Notes on the kernel that PyTorch chose for plain `sdpa`."""
    backends = dict.fromkeys(run.record.model.attention_backend for run in cell.ok)
    attention = cell.facts.get("attention")
    return [f"PyTorch took {backend} for {attention}" for backend in backends if backend is not None]


ATTENTION = Feature(
    columns=(
        *_columns("forward"),
        *_columns("backward"),
        # Computed from the shape, so a run that ran out of memory has it too.
        Quantity(
            "saved_by_shape_bytes", "saved by shape",
            "memory.expected_saved_bytes", GIB, None,
        ),
    ),
    row_notes=_about,
)  # fmt: skip
