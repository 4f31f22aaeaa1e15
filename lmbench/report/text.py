"""Names too long for where they stand."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Width of a kernel's name within a sentence.
KERNEL_WIDTH = 40


def shortened(text: str, width: int) -> str:
    """The text's beginning and end: generated names differ in their last digits."""
    if len(text) <= width:
        return text
    tail = width // 3
    return f"{text[: width - tail - 2]}..{text[-tail:]}"


#: Where a text may go on in another line, the best places first; what stands there stays at the line's end.
_BREAKS = (", ", " ", "/", ".", "_")


def folded(text: str, width: int) -> list[str]:
    """The whole text in lines of that width at most, broken where its parts meet."""
    return [line.rstrip() for line in _lines(text, width, _BREAKS)]


def _lines(text: str, width: int, breaks: Sequence[str]) -> list[str]:
    if len(text.rstrip()) <= width:
        return [text]
    if not breaks:
        return [text[at : at + width] for at in range(0, len(text), width)]
    lines: list[str] = []
    for part in re.findall(f".*?{re.escape(breaks[0])}|.+$", text):
        if lines and len((lines[-1] + part).rstrip()) <= width:
            lines[-1] += part
        else:
            lines += _lines(part, width, breaks[1:])
    return lines
