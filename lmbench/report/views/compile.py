"""Compile: what torch.compile buys, what it costs at the start, and when that has paid."""

from lmbench.report.facts import EAGER
from lmbench.report.relative import Baseline
from lmbench.report.views.view import ChartSpec, TableSpec, View

VIEW = View(
    name="compile",
    title="torch.compile",
    question="How much faster is the compiled step, and after how many steps has compiling paid for itself?",
    tables=(
        TableSpec(
            "Eager and compiled",
            ("size", "mode", "compile"),
            (
                "step_s", "speedup", "pays_after_steps", "cold_first_step_s", "warm_first_step_s", "graph_count",
                "graph_break_count", "host_bound_fraction", "peak_bytes", "host_peak_bytes", "memory_saved_fraction",
            ),
        ),
    ),
    charts=(
        ChartSpec("Step time", "bars", "step_s", "size", ("compile",)),
        ChartSpec("First step, cold", "bars", "cold_first_step_s", "size", ("compile",)),
        ChartSpec("Peak memory", "bars", "peak_bytes", "size", ("compile",)),
    ),
    baseline=Baseline({"compile": EAGER}, "eager"),
)  # fmt: skip
