"""Batch: throughput and memory against batch size."""

from lmbench.report.views.view import ChartSpec, TableSpec, View

VIEW = View(
    name="batch",
    title="Batch size",
    question="Which batch size uses the device well, and what is the largest that fits?",
    tables=(
        TableSpec(
            "Throughput and memory by batch size",
            ("size", "mode", "batch"),
            (
                "tokens_per_s", "mfu_fraction", "host_bound_fraction", "step_s", "joules_per_token", "peak_bytes",
                "host_peak_bytes",
            ),
        ),
    ),
    charts=(
        ChartSpec("Throughput", "lines", "tokens_per_s", "batch", ("size",)),
        ChartSpec("Peak memory", "lines", "peak_bytes", "batch", ("size",)),
        ChartSpec("MFU", "lines", "mfu_fraction", "batch", ("size",)),
    ),
)  # fmt: skip
