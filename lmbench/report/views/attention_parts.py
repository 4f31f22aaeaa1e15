"""Attention parts: what scores, mask, softmax and values take where attention is written out."""

from lmbench.kernels.trace.shares import ATTENTION_PARTS
from lmbench.report.views.view import ChartSpec, TableSpec, View

_ROWS = ("size", "context", "mode", "precision", "compile")


def _inside(phase: str) -> TableSpec:
    times = tuple(f"{phase}_{part}_s" for part in (*ATTENTION_PARTS, "matmul"))
    ratios = (f"{phase}_softmax_matmul_time_ratio", f"{phase}_softmax_matmul_flop_ratio")
    return TableSpec(f"Inside attention, {phase}", _ROWS, (*times, *ratios), only_filled=True)


VIEW = View(
    name="attention_parts",
    title="Inside attention",
    question="What do score product, mask, softmax and value product take, and softmax against its share of the FLOPs?",
    tables=(
        TableSpec(
            "Kernel time",
            _ROWS,
            (
                "kernel_count", "kernel_s", "forward_kernel_s", "backward_kernel_s", "trace_host_wait_fraction",
                "unclassified_part_fraction",
            ),
        ),
        _inside("forward"),
        _inside("backward"),
    ),
    charts=(
        ChartSpec("Softmax / matmul, forward", "lines", "forward_softmax_matmul_time_ratio", "context", ("size",)),
        ChartSpec("Softmax / matmul, backward", "lines", "backward_softmax_matmul_time_ratio", "context", ("size",)),
        ChartSpec("Forward of attention", "attention", "forward"),
        ChartSpec("Backward of attention", "attention", "backward"),
    ),
    is_profiled=True,
)  # fmt: skip
