"""Charts as Vega-Lite specifications: drawn by the page itself, without a network, and as SVG without a browser.

Specifications are plain mappings, not altair objects: altair takes 0.42 s to import and builds the same mappings;
vl-convert takes 0.01 s. Its bundle of Vega, Vega-Lite and vega-embed is 0.9 MB of JavaScript, once in a page; plotly.js
is 4 to 5 MB. A timeline of 20,000 spans adds 2 MB to the page. The bundle takes 1.5 s
to make and is kept in the user's cache folder.

Colours are the custom properties of page.css, such as `var(--of-forward)`, so that one specification serves light and
dark pages, and a name has the same colour in every chart. Expressions are interpreted (vega-interpreter): the page's
policy allows no `eval`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lmbench.masking import shown_json, shown_lines
from lmbench.records.store import write_whole
from lmbench.report.shipped import shipped

Spec = Mapping[str, Any]


def colour(name: str, place: int = 0) -> str:
    """The colour of page.css for what is called that, else that of the place in the palette; 0 is the muted one."""
    other = f"--series-{place}" if place else "--muted"
    return f"var(--of-{re.sub(r'[^0-9A-Za-z]+', '_', name)}, var({other}))"


def template(name: str) -> dict[str, Any]:
    """What charts of a kind share, of charts.json."""
    spec: dict[str, Any] = json.loads(shipped("charts.json"))[name]
    return spec


def themed(spec: Spec) -> dict[str, Any]:
    """A specification with the look of lmbench's pages, as wide as its container where it gives no width."""
    return {"width": "container", **spec, "config": json.loads(shipped("vega_theme.json"))}


def fragment(spec: Spec) -> str:
    """The chart as HTML for a page that has `javascript()` once: the specification, until it is drawn.

    With `usermeta: {zoom: {signal, start, end}}` it is as wide as the page and has buttons that move and zoom the
    x axis; `signal` is Vega's name for the bound interval, such as `zoom_start` for a parameter `zoom` and a field
    `start`. An empty specification, of a chart that cannot be drawn, is nothing.
    """
    if not spec:
        return ""
    text = shown_json(json.dumps(themed(spec), separators=(",", ":"), allow_nan=False, ensure_ascii=False))
    # Within a script element only `</script` and `<!--` mean anything.
    data = text.replace("<", "\\u003c")
    wide = " wide" if "usermeta" in spec else ""
    waiting = "<p>This picture is drawn by JavaScript.</p>"
    return f'<div class="vega{wide}"><script type="application/json">{data}</script>{waiting}</div>'


def svg(spec: Spec, width: int = 900) -> str:
    """The chart as a file of its own, with the palette for light and dark viewers."""
    style = shipped("page.css").partition("* {")[0]
    head, tag, rest = _picture(spec, width).partition(">")
    surface = '<rect width="100%" height="100%" fill="var(--surface)"/>'
    return f"{head}{tag}<style>{style}</style>{surface}{rest}\n"


@cache
def javascript() -> str:
    """The script of a page with charts: the libraries and what draws every `fragment`."""
    loader = shipped("vega.js")
    key = hashlib.sha256(f"{version('vl-convert-python')} {loader}".encode()).hexdigest()[:16]
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lmbench", f"vega-{key}.js")
    with suppress(OSError):
        return cached.read_text("utf-8")
    from vl_convert import javascript_bundle

    text = shown_lines(javascript_bundle(loader))
    # Without a folder to keep it in, it is made again for the next page.
    with suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_whole(cached, text)
    return text


def _picture(spec: Spec, width: int) -> str:
    from vl_convert import vegalite_to_svg

    size = {"width": width, "autosize": {"type": "fit-x", "contains": "padding"}}
    return shown_lines(vegalite_to_svg(themed({**size, **spec})))
