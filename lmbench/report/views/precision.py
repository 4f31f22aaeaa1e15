"""Precision: what each pair of compute and float32 matmul precision buys, and what it costs in accuracy."""

from lmbench.report.facts import EAGER, FP32_MATMUL
from lmbench.report.relative import Baseline
from lmbench.report.views.view import ChartSpec, TableSpec, View

VIEW = View(
    name="precision",
    title="Precision",
    question="What does a lower precision buy in time and memory, and how far do loss and gradients move?",
    tables=(
        TableSpec(
            "Step time and memory by precision",
            ("size", "mode", "precision", "matmul"),
            (
                "step_s", "speedup", "tokens_per_s", "mfu_fraction", "host_bound_fraction", "peak_bytes",
                "host_peak_bytes", "memory_saved_fraction",
            ),
        ),
        TableSpec(
            "Accuracy by precision, same seed and data",
            ("size", "mode", "precision", "matmul"),
            ("first_loss", "first_loss_difference", "gradient_norm_difference_fraction", "skipped_count"),
        ),
    ),
    charts=(
        ChartSpec("Step time", "bars", "step_s", "size", ("precision", "matmul")),
        ChartSpec("Peak memory", "bars", "peak_bytes", "size", ("precision", "matmul")),
    ),
    baseline=Baseline({"precision": "32-true", "matmul": FP32_MATMUL, "compile": EAGER}, "fp32 eager"),
)  # fmt: skip
