"""Sweep: for any grid and for runs that have nothing to do with each other; a row for whatever differs."""

from lmbench.report.views.view import ChartSpec, TableSpec, View

VIEW = View(
    name="sweep",
    title="Runs",
    question="",
    tables=(
        TableSpec(
            "Step times",
            (),
            (
                "step_s", "speedup", "forward_s", "backward_s", "optimizer_s", "tokens_per_s", "mfu_fraction",
                "host_bound_fraction", "peak_bytes", "host_peak_bytes", "memory_saved_fraction",
            ),
        ),
    ),
    charts=(
        ChartSpec("Step time", "rows", "step_s", ""),
        ChartSpec("Throughput", "rows", "tokens_per_s", ""),
        ChartSpec("Peak memory", "rows", "peak_bytes", ""),
    ),
)  # fmt: skip
