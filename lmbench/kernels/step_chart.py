"""The chart of one step: phases and launches of the host, phases, parts and kernels of the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmbench.kernels.step_timeline import StepTimeline
from lmbench.report.answer import Chart
from lmbench.report.palette import FUSED, MUTED, part_colour
from lmbench.report.palette import KINDS as KIND_COLOURS
from lmbench.report.palette import PHASES as PHASE_COLOURS
from lmbench.report.timeline import Layer, runs_of, timeline

#: Kernels with spans of their own in the rows of launches and kernels: 20,000 spans in all, a page of 2 MB.
MAX_KERNELS = 8000
#: Kernels of one part are one bar if no more than this lies between them: what lay in the queue follows within 1 to
#: 2 us; a longer gap is an idle device, and drawn as one.
_QUEUED_GAP_MS = 0.005
_ROWS = ("host: phases", "host: launches", "device: phases", "device: parts of the model", "device: kernels by kind")
_TIPS = {"took": "took", "from": "from"}


def step_chart(title: str, step: StepTimeline) -> Chart:
    """The chart of a step. A phase goes on while the device waits, parts and kernels do not."""
    end, columns = step.end_ns / 1e6, step.kernels
    kernels: list[dict[str, Any]] = []
    for start, length, name, kind, part, phase, is_own, launch, launch_length in zip(
        columns.start_ns, columns.duration_ns, columns.name, columns.kind, columns.part, columns.phase,
        columns.is_own, columns.launch_ns, columns.launch_duration_ns, strict=True,
    ):  # fmt: skip
        launched = "in the step before" if launch is None else f"{(start - launch) / 1e3:,.1f} us before it starts"
        kernels.append({
            "start": max(start, 0) / 1e6, "end": (start + max(length, 1)) / 1e6, "kernel": step.names[name],
            "kind": step.kinds[kind], "part": step.parts[part], "phase": step.phases[phase],
            "opacity": 1 if is_own else 0.4, "launched": launched,
            "launch": None if launch is None else (launch / 1e6, (launch + max(launch_length or 0, 1)) / 1e6),
        })  # fmt: skip
    longest = sorted(kernels, key=lambda kernel: kernel["start"] - kernel["end"])[:MAX_KERNELS]
    launches = [
        {**kernel, "start": kernel["launch"][0], "end": kernel["launch"][1]} for kernel in longest if kernel["launch"]
    ]
    host: list[dict[str, Any]] = [
        {"name": name, "start": max(start, 0) / 1e6, "end": min(stop / 1e6, end)}
        for name, start, stop in step.host_phases
        if stop > 0 and start / 1e6 < end
    ]
    phases = runs_of(kernels, ("phase", "opacity"), end)
    parts = runs_of(kernels, ("part", "opacity"), _QUEUED_GAP_MS)
    kernel_tips = {
        "kernel": "kernel",
        "kind": "kind",
        "part": "part",
        "phase": "phase",
        **_TIPS,
        "launched": "launched",
    }
    colours = {
        "phases": {name: PHASE_COLOURS.get(name, MUTED) for name in (*(span["name"] for span in host), *step.phases)},
        "parts": {FUSED if "+" in name else name: part_colour(name) for name in step.parts},
        "kinds": {name: KIND_COLOURS.get(name, MUTED) for name in step.kinds},
    }
    layers = [
        Layer("phases", [_span(span, 0, span["name"]) for span in host], colours["phases"], {"name": "phase", **_TIPS}),
        Layer("kinds", [_span(span, 1, span["kind"]) for span in launches], colours["kinds"], kernel_tips, False),
        Layer("phases", [_span(span, 2, span["phase"]) for span in phases], colours["phases"],
              {"name": "phase", **_TIPS}, has_legend=False),
        Layer("parts", [_span(span, 3, FUSED if "+" in span["part"] else span["part"]) for span in parts],
              colours["parts"], {"part": "part", **_TIPS}),
        Layer("kinds", [_span(span, 4, span["kind"]) for span in longest], colours["kinds"], kernel_tips),
    ]  # fmt: skip
    labels = {
        "data": {"values": [{"row": row, "low": len(_ROWS) - place - 0.3} for place, row in enumerate(_ROWS)]},
        "mark": {"type": "text", "align": "left", "baseline": "bottom", "color": "var(--muted)"},
        "encoding": {"x": {"value": 0}, "y": {"field": "low", "type": "quantitative"}, "text": {"field": "row"}},
    }
    shorter = f" {len(kernels) - MAX_KERNELS:,} shorter ones are left out." if len(kernels) > MAX_KERNELS else ""
    return Chart(
        title, timeline(layers, end, len(_ROWS), height=200, x={"title": "ms"}, y=None, more=[labels]),
        f"{sum(columns.is_own):,} kernels, from the host's beginning of the step to the end of the last of them, "
        f"under the profiler, which slows the host.{shorter} A phase goes on while it waits, parts and kernels do not. "
        "Paler: work of the step before. The trace opens in Perfetto (ui.perfetto.dev) too.",
    )  # fmt: skip


def _span(span: Mapping[str, Any], row: int, name: str) -> dict[str, Any]:
    """A span in a row, the first on top."""
    low, took_us = len(_ROWS) - 1 - row + 0.1, (span["end"] - span["start"]) * 1e3
    times = {"took": f"{took_us:,.1f} us", "from": f"{span['start']:,.4f} ms"}
    kept = {key: value for key, value in span.items() if key != "launch"}
    return {**kept, "low": low, "high": low + 0.55, "name": name, **times}
