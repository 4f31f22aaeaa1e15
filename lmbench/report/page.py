"""An answer as a single HTML page that loads nothing else, as HTML for a notebook, and a chart as an SVG picture.

Charts are plain mappings, not altair objects: altair takes 0.42 s to import and builds the same mappings, vl-convert
takes 0.01 s. Its bundle of Vega, Vega-Lite and vega-embed adds 0.9 MB of JavaScript to a page; plotly.js is 4 to 5 MB.
A timeline of 20,000 spans adds 2 MB. The bundle takes 1.5 s to make and is kept in the user's cache folder.

Colours are the custom properties of page.css, such as `var(--of-forward)`. So one specification serves light and dark
pages, and a name has the same colour in every chart. Expressions are interpreted (vega-interpreter), since the page's
content security policy allows no `eval`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from textwrap import wrap
from typing import Any

from lmbench.files import cache_folder, short_digest
from lmbench.masking import masked_message, shown, shown_json, shown_lines
from lmbench.records.store import write_whole
from lmbench.records.vocabulary import Values
from lmbench.report import shipped
from lmbench.report.answer import Answer, Chart, Spec, listed


def page(answer: Answer) -> str:
    """The text of the page. The same answer gives the same text."""
    from markupsafe import Markup

    sections = [(part, part.charts()) for part in (answer, *answer.sections)]
    sections = [(part, charts) for part, charts in sections if part.title or part.headline or part.tables or charts]
    scripts = [*([javascript()] if any(charts for _, charts in sections) else []), shipped("table.js")]
    # The content security policy allows scripts by their hashes.
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    text = _html("answer.html").render(
        # A page without a title goes by its first line: its run or trace, or its verdict.
        title=listed(*(part.title for part, _ in sections)) or next((line.text for line in answer.headline), ""),
        style=Markup(shipped("page.css")),
        sections=sections,
        chart=lambda chart: Markup(chart_html(chart.spec)),
        scripts=list(map(Markup, scripts)),
        script_source=" ".join(f"'sha256-{digest}'" for digest in hashes),
    )
    return shown_lines(text)


def notebook_html(answer: Answer) -> str:
    """HTML for a notebook's cell, without script or style sheet, with all text escaped."""
    return str(_html("fragment.html").render(answer=answer))


@cache
def template(name: str, **syntax: Any) -> Any:
    """A jinja template of this package; `syntax` changes jinja's delimiters and settings."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("lmbench.report", "")
    environment = Environment(loader=loader, trim_blocks=True, undefined=StrictUndefined, **syntax)
    environment.filters |= {"shown": shown, "masked": lambda text: shown(masked_message(text))}
    return environment.get_template(name)


def _html(name: str) -> Any:
    return template(name, autoescape=True, lstrip_blocks=True)


# charts


def chart_html(spec: Spec) -> str:
    """The chart as HTML: its specification, which the page's `javascript()` draws. An empty one gives no HTML.

    With `usermeta: {zoom: {signal, start, end}}` the chart is as wide as the page and has buttons that move and zoom
    the x axis. `signal` is Vega's name for the bound interval, such as `zoom_start` for a parameter `zoom` and a field
    `start`.
    """
    if not spec:
        return ""
    text = shown_json(json.dumps(_themed(spec), separators=(",", ":"), allow_nan=False, ensure_ascii=False))
    # Within a script element, `</script` and `<!--` alone have a meaning to HTML.
    data = text.replace("<", "\\u003c")
    wide = " wide" if "usermeta" in spec else ""
    waiting = "<p>This picture is drawn by JavaScript.</p>"
    return f'<div class="vega{wide}"><script type="application/json">{data}</script>{waiting}</div>'


def svg(chart: Chart) -> str:
    """The chart as an SVG file with its title and caption, 900 pixels wide, with the palettes for light and dark
    viewers."""
    from vl_convert import vegalite_to_svg

    title = {"text": wrap(chart.title, 100), "subtitle": wrap(chart.caption, 130)}
    frame = {"width": 900, "autosize": {"type": "fit-x", "contains": "padding"}, "title": title}
    head, bracket, body = shown_lines(vegalite_to_svg(_themed({**frame, **chart.spec}))).partition(">")
    style = shipped("page.css").partition("* {")[0]
    surface = '<rect width="100%" height="100%" fill="var(--surface)"/>'
    return f"{head}{bracket}<style>{style}</style>{surface}{body}\n"


def _themed(spec: Spec) -> Values:
    """The specification with lmbench's theme, as wide as its container unless it has a width."""
    return {"width": "container", **spec, "config": json.loads(shipped("vega_theme.json"))}


@cache
def javascript() -> str:
    """The script of a page with charts: the libraries, and vega.js, which draws the charts."""
    loader = shipped("vega.js")
    key = short_digest(f"{version('vl-convert-python')} {loader}", 16)
    cached = cache_folder() / f"vega-{key}.js"
    with suppress(OSError):
        return cached.read_text("utf-8")
    from vl_convert import javascript_bundle

    text = shown_lines(javascript_bundle(loader))
    # If the cache cannot be written, the next page makes the bundle again.
    with suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_whole(cached, text)
    return text
