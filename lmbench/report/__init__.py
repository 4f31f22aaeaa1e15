"""Answers in every format, and the report of results as one answer: tables, charts and sentences."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def shipped(name: str) -> str:
    """The text of a file beside the report's modules."""
    return (files(__name__) / name).read_text("utf-8")
