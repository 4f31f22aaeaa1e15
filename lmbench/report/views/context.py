"""Context: step time, throughput and memory as sequences grow."""

from lmbench.report.views.view import ChartSpec, TableSpec, View

_ROWS = ("size", "mode")

VIEW = View(
    name="context",
    title="Context length",
    question="How do step time, throughput and memory grow with the context, and what still fits?",
    tables=(
        TableSpec("Step time (ms)", _ROWS, ("step_s",), across="context"),
        TableSpec("Throughput (tokens/s)", _ROWS, ("tokens_per_s",), across="context"),
        TableSpec("Peak memory (GiB)", _ROWS, ("peak_bytes",), across="context"),
        TableSpec("Peak host memory (GiB)", _ROWS, ("host_peak_bytes",), across="context"),
    ),
    charts=(
        ChartSpec("Step time", "lines", "step_s", "context", ("size",), is_log=True),
        ChartSpec("Throughput", "lines", "tokens_per_s", "context", ("size",), is_log=True),
        ChartSpec("Peak memory", "lines", "peak_bytes", "context", ("size",), is_log=True),
    ),
)
