"""Timelines as Vega-Lite charts: layers of spans over one axis of time, which can be moved and zoomed.

The timeline of a step and the memory of a history are both such layers. What they do not show others do: a trace opens
in Perfetto (https://ui.perfetto.dev), a snapshot in memory_viz (https://pytorch.org/memory_viz).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lmbench.records.load import Run
from lmbench.report.answer import Chart
from lmbench.report.charts import rows_of
from lmbench.report.frame import Frame
from lmbench.report.vega import Spec, colour

#: Of a whole page.
MAX_TIMELINES = 8


class Layer(NamedTuple):
    """Spans with one legend.

    Every span is a mapping with `start` and `end` on the axis of time, `low` and `high` on the other one, `name` (whose
    colour `colours` gives as a place in the palette; the order is the legend's), and what a pointer over it shows: the
    fields of `tips`, each with its title. `opacity` is 1 where a span has none.
    """

    title: str
    spans: Sequence[Mapping[str, Any]]
    colours: Mapping[str, int]
    tips: Mapping[str, str]
    has_legend: bool = True

    def spec(self) -> Spec:
        scale = {"domain": list(self.colours), "range": [colour(place) for place in self.colours.values()]}
        legend = {"title": self.title, "columns": 4} if self.has_legend else None
        return {
            "data": {"values": [{"opacity": 1, **span} for span in self.spans]},
            "mark": {"type": "rect", "clip": True, "aria": False},
            "encoding": {
                "x": {"field": "start", "type": "quantitative"}, "x2": {"field": "end"},
                "y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"},
                "color": {"field": "name", "type": "nominal", "scale": scale, "legend": legend},
                "opacity": {"field": "opacity", "type": "quantitative", "scale": None},
                "tooltip": [{"field": field, "type": "nominal", "title": title} for field, title in self.tips.items()],
            },
        }  # fmt: skip


def timeline(
    layers: Sequence[Layer], end: float, top: float, *, height: int, x: Spec, y: Spec | None, more: Sequence[Spec] = ()
) -> Spec:
    """A timeline from 0 to `end`; the other axis goes from 0 to `top`.

    Args:
        layers: from the back to the front.
        height: of the picture in pixels.
        x, y: Vega-Lite's axes; without `y` the spans' rows have labels of their own.
        more: further layers of marks, which are no spans.
    """
    zoom = {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.ctrlKey || event.metaKey]"}
    specs = [dict(layer.spec()) for layer in layers if layer.spans]
    specs[0]["params"] = [{"name": "zoom", "select": zoom, "bind": "scales"}]
    axes = {"x": x, "y": y}
    scales = {"x": {"domain": [0, end], "nice": False}, "y": {"domain": [0, top], "nice": False}}
    for spec in (*specs, *more):
        for name in ("x", "y"):
            if name in spec["encoding"]:
                spec["encoding"][name] |= {"scale": scales[name], "axis": axes[name]}
    return {
        "height": height,
        "layer": [*specs, *more],
        "resolve": {"scale": {"color": "independent"}, "legend": {"color": "independent"}},
        "usermeta": {"zoom": {"signal": "zoom_start", "start": 0, "end": end}},
    }


def runs_of(spans: Iterable[Mapping[str, Any]], keys: Sequence[str], gap: float) -> list[dict[str, Any]]:
    """Spans in order that share the values of the keys as one, where no more than `gap` is between them."""
    joined: list[dict[str, Any]] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and span["start"] - last["end"] <= gap and all(span[key] == last[key] for key in keys):
            last["end"] = max(last["end"], span["end"])
        else:
            joined.append(dict(span))
    return joined


def page_charts(
    frame: Frame, file: str, is_meant: Callable[[Run], bool], chart: Callable[[str, Any], Chart],
    read: Callable[[Path], Any],
) -> list[Chart]:  # fmt: skip
    """A timeline for each cell with a run that `is_meant` and has the file, as many as a page has room for.

    Of a file that is torn or was changed by hand (`read` raises ValueError) the caption says why it is not drawn.
    """
    charts: list[Chart] = []
    for title, cell in rows_of(frame):
        runs = (run for run in frame.runs_of(cell, is_shown=None) if is_meant(run))
        path = next((run.path for run in runs if os.path.lexists(run.path / file)), None)
        if path is None:
            continue
        if len(charts) >= MAX_TIMELINES:
            return [*charts, Chart("More timelines", {}, "They are left out: the page would become too large.")]
        try:
            charts.append(chart(title, read(path)))
        except ValueError as error:
            charts.append(Chart(title, {}, f"Not shown, as the file cannot be used: {error}."))
    return charts
