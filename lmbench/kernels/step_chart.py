"""The chart of one step: phases and launches of the host, phases, parts and kernels of the device."""

from __future__ import annotations

import numpy as np
import pandas as pd
from msgspec.structs import astuple

from lmbench.kernels.parts import FUSED
from lmbench.kernels.step_timeline import StepKernel, StepTimeline
from lmbench.report.answer import Chart, Spec
from lmbench.report.timeline import joined, layer, timeline

#: Kernels with spans of their own in the rows of launches and kernels: 20,000 spans in all, a page of 2 MB.
MAX_KERNELS = 8000
#: Kernels of one part are one bar if no more than this lies between them: what lay in the queue follows within 1 to
#: 2 us; a longer gap is an idle device, and drawn as one.
_QUEUED_GAP_MS = 0.005
_KERNEL_TIPS = ("kernel", "part", "phase", "launched")


def step_chart(title: str, step: StepTimeline) -> Chart:
    """The chart of a step. A phase goes on while the device waits, parts and kernels do not."""
    end_ms = step.end_ns / 1e6
    kernels = pd.DataFrame(map(astuple, step.kernels), columns=StepKernel.__struct_fields__)
    kernels = kernels.astype({"launch_ns": float, "launch_duration_ns": float})
    is_own, ended_ns = kernels.launch_ns.notna(), kernels.start_ns + kernels.duration_ns.clip(1)
    waited_us = (kernels.start_ns - kernels.launch_ns) / 1e3
    kernels = kernels.assign(
        start=kernels.start_ns.clip(0) / 1e6, end=ended_ns / 1e6, opacity=np.where(is_own, 1, 0.4),
        launched=waited_us.map("{:,.1f} us before it starts".format).where(is_own, "in the step before"),
    )  # fmt: skip
    longest = kernels.loc[(kernels.start - kernels.end).sort_values(kind="stable").index[:MAX_KERNELS]]
    launches = longest.dropna(subset="launch_ns")
    launched_ns = launches.launch_ns + launches.launch_duration_ns.clip(1)
    launches = launches.assign(start=launches.launch_ns / 1e6, end=launched_ns / 1e6)
    host = pd.DataFrame(step.host_phases, columns=["phase", "start", "end"])
    host[["start", "end"]] = host[["start", "end"]].clip(0, step.end_ns) / 1e6
    rows: list[tuple[str, pd.DataFrame, str, tuple[str, ...], str | None]] = [
        ("host: phases", host[host.start < host.end], "phase", (), "phases"),
        ("host: launches", launches, "kind", _KERNEL_TIPS, None),
        ("device: phases", joined(kernels, ["phase", "opacity"], end_ms), "phase", (), None),
        ("device: parts of the model", joined(kernels, ["part", "opacity"], _QUEUED_GAP_MS), "part", (), "parts"),
        ("device: kernels by kind", longest, "kind", _KERNEL_TIPS, "kinds"),
    ]
    layers, labels = list[Spec](), []
    for low, (label, spans, field, tips, legend) in zip(reversed(range(len(rows))), rows, strict=True):
        words = spans[field]
        drawn = spans.assign(
            name=words.mask(words.str.contains("+", regex=False), FUSED), low=low + 0.1, high=low + 0.65,
            took=((spans.end - spans.start) * 1e3).map("{:,.1f} us".format),
            begins=spans.start.map("{:,.4f} ms".format),
        )  # fmt: skip
        shown = {tip: tip for tip in (field, *tips, "took")} | {"begins": "from"}
        layers.append(layer(drawn, [*host.phase, *drawn.name] if field == "phase" else drawn.name, shown, legend))
        labels.append({"start": 0, "low": low + 0.7, "row": label})
    layers.append({
        "data": {"values": labels},
        "mark": {"type": "text", "align": "left", "baseline": "bottom", "color": "var(--muted)"},
        "encoding": {"x": {"value": 0}, "text": {"field": "row"}},
    })  # fmt: skip
    left_out = len(kernels) - len(longest)
    shorter = f" {left_out:,} shorter ones are left out." if left_out else ""
    return Chart(
        title, timeline(layers, end_ms, len(rows), 200, {"title": "ms"}, None),
        f"{is_own.sum():,} kernels, from the host's beginning of the step to the end of the last of them, "
        f"under the profiler, which slows the host.{shorter} A phase goes on while it waits, parts and kernels do not. "
        "Paler: work of the step before. The trace opens in Perfetto (ui.perfetto.dev) too.",
    )  # fmt: skip
