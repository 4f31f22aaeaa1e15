"""Kernels: which kinds of kernel and which parts of the model each phase spends its device time in."""

from lmbench.kernels.shown.columns import FUSED, share_name
from lmbench.kernels.trace.kinds import KINDS
from lmbench.kernels.trace.parts import PARTS
from lmbench.report.views.view import ChartSpec, TableSpec, View

_ROWS = ("size", "context", "mode", "precision", "compile")
_NAMES = {"kind": KINDS, "part": (*PARTS, FUSED)}


def _shares(axis: str, phase: str, title: str) -> TableSpec:
    return TableSpec(title, _ROWS, tuple(share_name(phase, axis, name) for name in _NAMES[axis]), only_filled=True)


VIEW = View(
    name="kernels",
    title="Kernels",
    question=(
        "Which kernels and which parts of the model take the device's time, how much of it is matrix products, and did "
        "the device wait for the host?"
    ),
    tables=(
        TableSpec(
            "Kernel time",
            _ROWS,
            (
                "kernel_count", "kernel_s", "forward_kernel_s", "backward_kernel_s", "optimizer_kernel_s",
                "inference_matmul_fraction", "forward_matmul_fraction", "backward_matmul_fraction",
                "step_matmul_fraction", "top_other_fraction", "trace_host_wait_fraction", "unclassified_part_fraction",
            ),
        ),
        _shares("kind", "forward", "Shares by kind of forward (of inference: its forward)"),
        _shares("kind", "backward", "Shares by kind of backward"),
        _shares("kind", "step", "Shares by kind of the whole step"),
        _shares("part", "forward", "Shares by part of forward (of inference: its forward)"),
        _shares("part", "backward", "Shares by part of backward"),
        _shares("part", "step", "Shares by part of the whole step"),
    ),
    charts=(
        ChartSpec("Forward by part", "parts", "forward"),
        ChartSpec("Backward by part", "parts", "backward"),
        ChartSpec("Step by part", "parts", "step"),
        ChartSpec("Step by kind", "kinds", "step"),
    ),
    is_profiled=True,
)  # fmt: skip
