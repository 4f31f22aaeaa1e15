# ruff: noqa: E501 (tables, one row a line)
"""Fields of run.json that a profiled run has from its trace: kernel times by phase, kind and part, and clocks."""

from __future__ import annotations

from lmbench.records.old_field import Row, group

_OF_ALL = group(
    "Kernels",
    "run",
    (
        ("reason", "text", "no kernels because", "Why nothing is known of the kernels (a CPU, a trace that cannot be read); null where it is."),
        ("steps", "count", "steps", "Steps in the trace; times and counts of phases are means over them."),
        ("clock_steps", "count", "clocked steps", "Steps that the clocks are over: the first of several begins on an idle device and is left out."),
        ("phase_source", "text", "phases by", "Whose ranges tell the phases: `lmbench`, `foreign` or `none`."),
        ("kernel_s", "s", "kernel time", "Kernel time of a step, what lies outside of all phases included.", "down"),
        ("outside_s", "s", "outside", "Kernel time launched outside of every phase.", "down"),
        ("unclassified_kind_fraction", "fraction", "no kind", "Share of kernel time whose kind is unknown.", "down"),
        ("unclassified_part_fraction", "fraction", "no part", "Share of kernel time whose part of the model is unknown.", "down"),
        ("captured_kernel_count", "count", "kernels in the trace", "Kernels, copies and fills of the whole trace."),
        ("captured_launch_count", "count", "launches in the trace", "Launches of the whole trace."),
        ("kernel_without_launch_count", "count", "without launch", "Kernels whose launch is not in the trace.", "down"),
        ("launch_without_kernel_count", "count", "without kernel", "Launches whose kernel is not in the trace.", "down"),
        ("kernel_before_launch_count", "count", "before launch", "Kernels that start before their launch.", "down"),
    ),
    prefix="kernels.",
)  # fmt: skip

_OF_PHASE: tuple[Row, ...] = (
    ("kernel_s", "s", "<phase> kernels", "Sum of the kernels of <phase>.", "down"),
    ("kernel_count", "count", "kernels in <phase>", "Kernels, copies and fills."),
    ("matmul_fraction", "fraction", "matmul in <phase>", "Share of matrix products (kind `gemm`) in kernel time; fused attention is not counted."),
    ("kinds", "tree", "kinds", "Kernel time by kind, the largest first: `gemm_s`, ..."),
    ("parts", "tree", "parts", "Kernel time by part of the model, the largest first: `ffn_s`, ...; `+` joins the parts of a fused kernel."),
    ("top", "tree", "top kernels", "The longest kernels: name, kind, part, `kernel_s`, `kernel_count`, `share_fraction`."),
    ("top_other", "tree", "top other kernel", "The longest kernel that is no matrix product; null if there is none."),
    ("window_s", "s", "<phase> window", "First kernel of <phase> to the next phase's first: `busy_s` + `queued_gap_s` + `host_wait_s`.", "down"),
    ("busy_s", "s", "<phase> busy", "Union of kernel intervals.", "down"),
    ("queued_gap_s", "s", "<phase> gaps", "Gaps before kernels that lay in the queue.", "down"),
    ("host_wait_s", "s", "<phase> host wait", "All other gaps: the device waited for the host.", "down"),
    ("host_s", "s", "<phase> on the host", "The host's time in <phase>, slowed by the profiler."),
    ("launch_count", "count", "launches in <phase>", "Calls of the host that start something on the device.", "down"),
    ("median_kernel_s", "s", "median kernel", "Median duration of the kernels of <phase>."),
    ("verdict", "text", "<phase> by the trace", "`host-bound`, `queued` or `mixed`, by the share of host wait; null for a phase too short to judge."),
)  # fmt: skip

_ATTENTION: tuple[Row, ...] = (
    ("scores_s", "s", "scores", "Kernel time of the score product in <phase>, where attention is written out.", "down"),
    ("mask_s", "s", "mask", "Scaling the scores and masking them.", "down"),
    ("softmax_s", "s", "softmax", "Softmax.", "down"),
    ("values_s", "s", "values", "The value product and its copies.", "down"),
    ("matmul_s", "s", "products", "Matrix products within scores and values.", "down"),
    ("softmax_matmul_time_ratio", "1", "softmax / products", "Time of softmax divided by that of the products."),
    ("softmax_matmul_flop_ratio", "1", "softmax / products, FLOPs", "The same of FLOPs; null without the model's shape."),
)  # fmt: skip

KERNEL_FIELDS = (
    *_OF_ALL,
    *group("Kernels", "run", _OF_PHASE, prefix="kernels.phases.<phase>."),
    *group("Kernels", "run", _ATTENTION, prefix="kernels.attention.<phase>."),
)
