"""README and the guide's pages, and the blocks of code in them."""

from __future__ import annotations

import re

from paths import ROOT

from lmbench.guide import text, topics

README = (ROOT / "README.md").read_text()
PAGES = {"README": README, **{topic: text(topic) for topic in topics()}}


def blocks_of(page):
    """Language and text of each block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def block(topic, language, holding):
    (match,) = [text for lang, text in blocks_of(PAGES[topic]) if lang == language and holding in text]
    return match
