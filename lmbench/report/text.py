"""Names too long for where they stand."""

from __future__ import annotations

#: Width of a kernel's name within a sentence.
KERNEL_WIDTH = 40


def shortened(text: str, width: int) -> str:
    """The text's beginning and end: generated names differ in their last digits."""
    if len(text) <= width:
        return text
    tail = width // 3
    return f"{text[: width - tail - 2]}..{text[-tail:]}"
