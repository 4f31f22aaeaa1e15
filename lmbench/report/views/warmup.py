"""Warm-up: what is measured when the first steps are counted."""

from lmbench.report.relative import Baseline
from lmbench.report.views.view import ChartSpec, TableSpec, View

VIEW = View(
    name="warmup",
    title="Warm-up",
    question="What do the first steps add to the mean and to its spread when they are counted?",
    tables=(
        TableSpec(
            "Step time by steps of warm-up",
            ("size", "mode", "warmup"),
            ("step_s", "step_cv_fraction", "step_median_s", "step_min_s", "step_max_s", "slowdown"),
        ),
    ),
    charts=(
        ChartSpec("The first steps", "steps", "step_s", "warmup", ("warmup",), is_log=True),
        ChartSpec("Mean step time by warm-up", "bars", "step_s", "warmup", ("mode",)),
    ),
    baseline=Baseline({"warmup": 5}, "warm-up 5"),
)
