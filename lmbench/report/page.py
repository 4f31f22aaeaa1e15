"""Pages of rooms that do not give an `Answer` yet."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from lmbench.report.table import Table


def whole_page(command: str, title: str, body: str, style: str = "", scripts: Sequence[str] = ()) -> str:
    """A page that needs nothing else, and may load nothing.

    `body` and the styles and scripts that it needs beside the report's own are markup of our own making; `command` is
    what made it.
    """
    from markupsafe import Markup

    scripts = [*scripts, (files("lmbench.report") / "table.js").read_text(encoding="utf-8")]
    return _rendered(
        "frame.html",
        command=command,
        title=title,
        body=Markup(body),
        style=Markup(report_style() + style),
        scripts=[Markup(script) for script in scripts],
        script_source=f"; script-src {' '.join(map(_script_hash, scripts))}",
    )


def table_html(table: Table) -> str:
    """One table with its caption and notes, as it stands in a page."""
    return _rendered("table.html", table=table)


def report_style() -> str:
    """The style sheet of all pages; its first rules are the palette."""
    return (files("lmbench.report") / "page.css").read_text(encoding="utf-8")


def palette() -> str:
    """The colours of all pages, light and dark, for a picture in a file of its own."""
    return report_style().partition("* {")[0]


def _rendered(template: str, **values: Any) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return environment.from_string((files("lmbench.report") / template).read_text(encoding="utf-8")).render(values)


def _script_hash(script: str) -> str:
    """What a content security policy calls this one script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
