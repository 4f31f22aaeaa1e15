"""Charts as Vega-Lite specifications: drawn by the page itself, without a network, and as SVG without a browser.

Specifications are plain mappings, not altair objects: altair takes 0.42 s to import and builds the same mappings;
vl-convert takes 0.01 s. Its bundle of Vega, Vega-Lite and vega-embed is 0.9 MB of JavaScript, once in a page; plotly.js
is 4 to 5 MB. A timeline of 20,000 spans adds 0.4 MB to the page, since the data lie in columns. The bundle takes 1.5 s
to make and is kept in the user's cache folder.

Colours are the custom properties of page.css, such as `var(--series-3)`, so that one specification serves light and
dark pages. Expressions are interpreted (vega-interpreter): the page's policy allows no `eval`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from lmbench.text import shown, shown_json, shown_lines

Spec = Mapping[str, Any]

#: Colours of series in a page's palette (page.css).
COLOURS = 19
#: Charts with more rows of data have no picture for readers without JavaScript: it would be larger than the data.
_MAX_STATIC_ROWS = 1000
_STATIC_WIDTH = 640
_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
_VIEW: Spec = {"background": "transparent", "font": _FONT, "view": {"stroke": None}}


def colour(place: int) -> str:
    """The colour of a place in the palette; 0 is the muted one, for what is no class of its own."""
    return f"var(--series-{place})" if place else "var(--muted)"


def themed(spec: Spec) -> dict[str, Any]:
    """A specification with the look of lmbench's pages, as wide as its container where it gives no width."""
    axis = {
        "labelColor": "var(--muted)", "titleColor": "var(--text)", "gridColor": "var(--grid)",
        "domainColor": "var(--line)", "tickColor": "var(--line)", "labelFontSize": 11, "titleFontSize": 12,
        "titleFontWeight": "normal",
    }  # fmt: skip
    legend = {
        "labelColor": "var(--text)", "titleColor": "var(--muted)", "orient": "bottom", "columns": 4, "title": None,
        "labelFontSize": 12, "symbolType": "square", "titleFontWeight": "normal",
        "layout": {"bottom": {"direction": "vertical", "anchor": "start"}},
    }  # fmt: skip
    config = {
        **_VIEW, "axis": axis, "legend": legend, "title": {"color": "var(--text)", "fontSize": 13},
        "text": {"color": "var(--text)"}, "rule": {"color": "var(--text)"},
        "range": {"category": [colour(place) for place in range(1, COLOURS + 1)]},
    }  # fmt: skip
    return {"width": "container", **spec, "config": {**config, **spec.get("config", {})}}


def fragment(spec: Spec) -> str:
    """The chart as HTML for a page that has `javascript()` once: the specification, and a picture until it is drawn.

    With `usermeta: {zoom: {signal, start, end}}` it is as wide as the page and has buttons that move and zoom the
    x axis; `signal` is Vega's name for the bound interval, such as `zoom_start` for a parameter `zoom` and a field
    `start`. An empty specification, of a chart that cannot be drawn, is nothing.
    """
    if not spec:
        return ""
    themed_spec = themed(spec)
    columns, rows = _in_columns(themed_spec)
    text = shown_json(json.dumps(columns, separators=(",", ":"), allow_nan=False, ensure_ascii=False))
    if rows <= _MAX_STATIC_ROWS:
        key = hashlib.sha256(text.encode()).hexdigest()[:8]
        picture = re.sub(r'(id="|url\(#)', rf"\g<1>{key}-", _picture(themed_spec, _STATIC_WIDTH))
    else:
        picture = "<p>This picture is drawn by JavaScript.</p>"
    # Within a script element only `</script` and `<!--` mean anything.
    data = text.replace("<", "\\u003c")
    wide = " wide" if "zoom" in spec.get("usermeta", {}) else ""
    return f'<div class="vega{wide}"><script type="application/json">{data}</script>{picture}</div>'


def svg(spec: Spec, width: int = 900) -> str:
    """The chart as a file of its own, with the palette for light and dark viewers."""
    style = (files("lmbench.report") / "page.css").read_text(encoding="utf-8").partition("* {")[0]
    head, tag, rest = _picture(themed(spec), width).partition(">")
    surface = '<rect width="100%" height="100%" fill="var(--surface)"/>'
    return f"{head}{tag}<style>{style}</style>{surface}{rest}\n"


@cache
def javascript() -> str:
    """The script of a page with charts: the libraries and what draws every `fragment`."""
    loader = (files("lmbench.report") / "vega.js").read_text(encoding="utf-8")
    key = hashlib.sha256(f"{version('vl-convert-python')} {loader}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmbench"
    cached = folder / f"vega-{key}.js"
    try:
        return cached.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    from vl_convert import javascript_bundle

    text = shown_lines(javascript_bundle(loader))
    unfinished = cached.with_name(f".{cached.name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(cached)
    except OSError:
        # Without a folder to keep it in, it is made again for the next page.
        unfinished.unlink(missing_ok=True)
    return text


def _picture(spec: Spec, width: int) -> str:
    from vl_convert import vegalite_to_svg

    size = width if spec["width"] == "container" else spec["width"]
    sized = {**spec, "width": size, "autosize": {"type": "fit-x", "contains": "padding"}}
    return shown_lines(vegalite_to_svg(sized))


def _in_columns(value: Any, key: str = "") -> tuple[Any, int]:
    """The specification with every `data: {values: [...]}` in columns, as vega.js reads it, and the number of rows.

    A column of text is a list of its different words and, for each row, the place of its word.
    """
    if isinstance(value, Mapping):
        records = value.get("values") if key == "data" else None
        if records is not None:
            names = dict.fromkeys(name for record in records for name in record)
            columns = {name: _column([record.get(name) for record in records]) for name in names}
            return {**{name: rest for name, rest in value.items() if name != "values"}, "columns": columns}, len(
                records
            )
        entries = {name: _in_columns(entry, name) for name, entry in value.items()}
        return {name: entry for name, (entry, _) in entries.items()}, sum(count for _, count in entries.values())
    if isinstance(value, list | tuple):
        items = [_in_columns(entry) for entry in value]
        return [item for item, _ in items], sum(count for _, count in items)
    return (shown(value) if isinstance(value, str) else value), 0


def _column(values: list[Any]) -> Any:
    if not all(isinstance(value, str) for value in values):
        return values
    places: dict[str, int] = {}
    return {"places": [places.setdefault(shown(value), len(places)) for value in values], "words": list(places)}
