"""Step times: how long a step takes, where it goes, and how much of the device it uses."""

from lmbench.report.views.view import ChartSpec, TableSpec, View

VIEW = View(
    name="step_times",
    title="Step times",
    question="How long is a step, where does it go, and how much memory does it take, by model size and mode?",
    tables=(
        TableSpec(
            "Step times",
            ("size", "mode"),
            (
                "step_s", "forward_s", "backward_s", "optimizer_s", "tokens_per_s", "mfu_fraction",
                "host_bound_fraction", "peak_bytes", "host_peak_bytes",
            ),
        ),
    ),
    charts=(
        ChartSpec("Step time", "bars", "step_s", "size", ("mode",), is_log=True),
        ChartSpec("Where the step goes", "phases", "step_s", "size"),
        ChartSpec("Peak memory", "bars", "peak_bytes", "size", ("mode",)),
        ChartSpec("MFU", "bars", "mfu_fraction", "size", ("mode",)),
    ),
)  # fmt: skip
