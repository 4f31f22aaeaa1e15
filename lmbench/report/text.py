"""Text that somebody else wrote (a kernel's name, a setting, a message), fit to be shown."""

from __future__ import annotations

import re

#: Width of a kernel's name within a sentence.
KERNEL_WIDTH = 40
_BREAKS = re.compile("[\t-\r]+")
#: Control characters, marks that turn the direction of writing or end a line, and halves of a surrogate pair, which
#: no encoding can write.
_RAW = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """The text on one line: breaks and tabs are blanks, and U+FFFD stands for what cannot be shown.

    Everything foreign goes through here on its way to a terminal, into Markdown, CSV or a page.
    """
    return _RAW.sub("\N{REPLACEMENT CHARACTER}", _BREAKS.sub(" ", text))


def shown_lines(text: str) -> str:
    """The same of text in several lines."""
    return "\n".join(map(shown, text.split("\n")))


def shortened(text: str, width: int) -> str:
    """The text's beginning and end: generated names differ in their last digits."""
    if len(text) <= width:
        return text
    tail = width // 3
    return f"{text[: width - tail - 2]}..{text[-tail:]}"
