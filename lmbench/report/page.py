"""An answer as one HTML page that needs and may load nothing else, as HTML for a notebook, and its charts as pictures.

Specifications are plain mappings, not altair objects: altair takes 0.42 s to import and builds the same mappings;
vl-convert takes 0.01 s. Its bundle of Vega, Vega-Lite and vega-embed is 0.9 MB of JavaScript, once in a page; plotly.js
is 4 to 5 MB. A timeline of 20,000 spans adds 2 MB to the page. The bundle takes 1.5 s to make and is kept in the
user's cache folder.

Colours are the custom properties of page.css, such as `var(--of-forward)`, so that one specification serves light and
dark pages, and a name has the same colour in every chart. Expressions are interpreted (vega-interpreter): the page's
policy allows no `eval`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lmbench.masking import masked_message, shown, shown_json, shown_lines
from lmbench.records.store import write_whole
from lmbench.report import shipped
from lmbench.report.answer import Answer, Spec


def page(answer: Answer) -> str:
    """The whole page. The same answer gives the same text."""
    from markupsafe import Markup

    parts = (answer, *answer.sections)
    drawn = [part.charts() for part in parts]
    scripts = [*([javascript()] if any(drawn) else []), shipped("table.js")]
    # What a content security policy calls these scripts.
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    sections = [
        (part, charts)
        for part, charts in zip(parts, drawn, strict=True)
        if part.title or part.headline or part.tables or charts
    ]
    text = _html("answer.html").render(
        title=", ".join(part.title for part in parts if part.title),
        style=Markup(shipped("page.css")),
        sections=sections,
        chart=lambda chart: Markup(chart_html(chart.spec)),
        scripts=list(map(Markup, scripts)),
        script_source=" ".join(f"'sha256-{digest}'" for digest in hashes),
    )
    return shown_lines(text)


def notebook_html(answer: Answer) -> str:
    """A piece of HTML for a notebook's cell: no script, no style sheet, everything in it escaped."""
    return str(_html("fragment.html").render(answer=answer))


@cache
def template(name: str, **syntax: Any) -> Any:
    """A template beside the report's modules; `syntax` is how it differs from jinja's own."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("lmbench.report", "")
    environment = Environment(loader=loader, trim_blocks=True, undefined=StrictUndefined, **syntax)
    environment.filters |= {"shown": shown, "masked": lambda text: shown(masked_message(text))}
    return environment.get_template(name)


def _html(name: str) -> Any:
    return template(name, autoescape=True, lstrip_blocks=True)


# charts


def chart_html(spec: Spec) -> str:
    """The chart as HTML for a page that has `javascript()` once: the specification, until it is drawn.

    With `usermeta: {zoom: {signal, start, end}}` it is as wide as the page and has buttons that move and zoom the
    x axis; `signal` is Vega's name for the bound interval, such as `zoom_start` for a parameter `zoom` and a field
    `start`. An empty specification, of a chart that cannot be drawn, is nothing.
    """
    if not spec:
        return ""
    text = shown_json(json.dumps(_themed(spec), separators=(",", ":"), allow_nan=False, ensure_ascii=False))
    # Within a script element only `</script` and `<!--` mean anything.
    data = text.replace("<", "\\u003c")
    wide = " wide" if "usermeta" in spec else ""
    waiting = "<p>This picture is drawn by JavaScript.</p>"
    return f'<div class="vega{wide}"><script type="application/json">{data}</script>{waiting}</div>'


def svg(spec: Spec) -> str:
    """The chart as a file of its own, 900 pixels wide, with the palette for light and dark viewers."""
    from vl_convert import vegalite_to_svg

    size = {"width": 900, "autosize": {"type": "fit-x", "contains": "padding"}}
    head, tag, rest = shown_lines(vegalite_to_svg(_themed({**size, **spec}))).partition(">")
    style = shipped("page.css").partition("* {")[0]
    surface = '<rect width="100%" height="100%" fill="var(--surface)"/>'
    return f"{head}{tag}<style>{style}</style>{surface}{rest}\n"


def _themed(spec: Spec) -> dict[str, Any]:
    """A specification with the look of lmbench's pages, as wide as its container where it gives no width."""
    return {"width": "container", **spec, "config": json.loads(shipped("vega_theme.json"))}


@cache
def javascript() -> str:
    """The script of a page with charts: the libraries and what draws every chart."""
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
