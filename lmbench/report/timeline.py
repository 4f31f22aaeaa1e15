"""Timelines as Vega-Lite charts: layers of spans over one axis of time, which can be moved and zoomed.

The memory of a history is such layers. What they do not show others do: a trace opens in Perfetto
(https://ui.perfetto.dev), a snapshot in memory_viz (https://pytorch.org/memory_viz).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lmbench.records.load import Run
from lmbench.report.answer import Chart, Spec
from lmbench.report.charts import colour, rows_of, template
from lmbench.report.frame import Frame

#: Of a whole page.
MAX_TIMELINES = 8


def layer(spans: pd.DataFrame, names: Iterable[str], tips: Mapping[str, str], legend: str | None = None) -> Spec:
    """Spans of a timeline as a layer, with a legend where that has a title.

    Spans have `start` and `end` on the axis of time, `low` and `high` on the other one, `name` (which decides the
    colour; the order of `names` is the legend's), and what a pointer over it shows: the fields of `tips`, each with its
    title. `opacity` is 1 where there is none.
    """
    fields = dict.fromkeys(["start", "end", "low", "high", "name", "opacity", *tips])
    domain, spec = list(dict.fromkeys(names)), template("spans")
    colours = {"scale": {"domain": domain, "range": list(map(colour, domain))}, "legend": legend and {"title": legend}}
    spec["encoding"]["color"] |= colours
    spec["encoding"]["tooltip"] = [{"field": name, "type": "nominal", "title": title} for name, title in tips.items()]
    return {**spec, "data": {"values": spans.reindex(columns=fields).fillna({"opacity": 1}).to_dict("records")}}


def timeline(layers: Sequence[Spec], end: float, top: float, height: int, x: Spec, y: Spec | None) -> Spec:
    """A timeline from 0 to `end`; the other axis goes from 0 to `top`.

    Args:
        layers: of spans or other marks, from the back to the front; `start` and `low` of their data are their places.
        height: of the picture in pixels.
        x, y: Vega-Lite's axes; without `y` the spans' rows have labels of their own.
    """
    spec = template("timeline")
    for channel, axis, most in (("x", x, end), ("y", y, top)):
        spec["encoding"][channel] |= {"axis": axis, "scale": {"domain": [0, most], "nice": False}}
    first = {**layers[0], "params": spec.pop("params")}
    zoom = {"signal": "zoom_start", "start": 0, "end": end}
    return {**spec, "height": height, "layer": [first, *layers[1:]], "usermeta": {"zoom": zoom}}


def page_charts(
    frame: Frame, file: str, is_meant: Callable[[Run], bool], chart: Callable[[str, Any], Chart],
    read: Callable[[Path], Any],
) -> list[Chart]:  # fmt: skip
    """A timeline for each cell with a run that `is_meant` and has the file, as many as a page has room for.

    The caption of a file that is torn or was changed by hand says why it is not drawn.
    """
    charts: list[Chart] = []
    for title, cell in rows_of(frame):
        runs = [run for run in frame.runs_of(cell, is_shown=None) if is_meant(run) and (run.path / file).exists()]
        if runs and len(charts) == MAX_TIMELINES:
            return [*charts, Chart("More timelines", {}, "They are left out: the page would become too large.")]
        try:
            charts += [chart(title, read(run.path)) for run in runs[:1]]
        except (ValueError, IndexError, TypeError) as error:
            charts.append(Chart(title, {}, f"Not shown, as the file cannot be used: {error}."))
    return charts
