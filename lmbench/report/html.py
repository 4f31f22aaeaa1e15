"""An answer as one HTML page that needs nothing else and may load nothing, and as a piece of HTML for a notebook."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import Any

from lmbench.masking import masked_message, shown, shown_lines
from lmbench.report.answer import Answer
from lmbench.report.shipped import shipped


def page(answer: Answer) -> str:
    """The whole page. The same answer gives the same text."""
    from markupsafe import Markup

    from lmbench.report import vega

    parts = (answer, *answer.sections)
    drawn = [part.charts() for part in parts]
    scripts = [*([vega.javascript()] if any(drawn) else []), shipped("table.js")]
    # What a content security policy calls these scripts.
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    sections = [
        (part, charts)
        for part, charts in zip(parts, drawn, strict=True)
        if part.title or part.headline or part.tables or charts
    ]
    text = _template("answer.html").render(
        title=", ".join(part.title for part in parts if part.title),
        style=Markup(shipped("page.css")),
        sections=sections,
        chart=lambda chart: Markup(vega.fragment(chart.spec)),
        scripts=list(map(Markup, scripts)),
        script_source=" ".join(f"'sha256-{digest}'" for digest in hashes),
    )
    return shown_lines(text)


def fragment(answer: Answer) -> str:
    """A piece of HTML for a notebook's cell: no script, no style sheet, everything in it escaped."""
    return str(_template("fragment.html").render(answer=answer))


@cache
def _template(name: str) -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("lmbench.report", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"shown": shown, "masked": lambda text: shown(masked_message(text))}
    return environment.get_template(name)
