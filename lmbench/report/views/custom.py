"""Custom: two shapes outside the named sizes, by precision."""

from lmbench.report.facts import EAGER, FP32_MATMUL
from lmbench.report.relative import Baseline
from lmbench.report.views.view import ChartSpec, TableSpec, View

VIEW = View(
    name="custom",
    title="Custom shapes",
    question="How do a narrow and a wider model of one's own (layers x width) compare?",
    tables=(
        TableSpec(
            "Step times (size is layers x width)",
            ("size", "mode", "precision", "matmul"),
            (
                "step_s", "speedup", "forward_s", "backward_s", "optimizer_s", "tokens_per_s", "mfu_fraction",
                "host_bound_fraction", "peak_bytes", "host_peak_bytes", "memory_saved_fraction",
            ),
        ),
    ),
    charts=(
        ChartSpec("Step time", "bars", "step_s", "size", ("precision", "matmul")),
        ChartSpec("Where the step goes", "phases", "step_s", "size"),
    ),
    baseline=Baseline({"precision": "32-true", "matmul": FP32_MATMUL, "compile": EAGER}, "fp32 eager"),
)  # fmt: skip
