"""The guide: pages of Markdown, shown by `lmbench guide`, on GitHub and as a site. `index.md` lists the others."""

from __future__ import annotations

import re
from importlib.resources import files

INDEX = "index"


def topics() -> list[str]:
    """Names of the pages, in the order in which the index links to them."""
    return list(dict.fromkeys(re.findall(r"\]\((\w+)\.md\)", text(INDEX))))


def text(topic: str) -> str:
    """A page's Markdown as its file has it."""
    return (files(__name__) / f"{topic}.md").read_text("utf-8")
