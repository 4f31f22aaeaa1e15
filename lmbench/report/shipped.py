"""Files that lie beside the report's modules: tables, templates, styles."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def shipped(name: str) -> str:
    return (files("lmbench.report") / name).read_text("utf-8")
