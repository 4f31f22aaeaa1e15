"""Text that somebody else wrote (a kernel's name, a setting, a path, a message), fit to be shown.

A terminal obeys control characters, a mark of direction turns what follows it around, and what has no width hides.
Whatever was read from a file, a command line or a process goes through here on its way to a screen, a table or a page.
"""

from __future__ import annotations

import re

#: What has no picture of its own: control and format characters, ends of lines, halves of a surrogate pair, which no
#: encoding can write (Unicode's categories Cc, Cf, Zl, Zp, Cs), and what else Unicode tells to draw as nothing
#: (Default_Ignorable_Code_Point, https://www.unicode.org/Public/16.0.0/ucd/DerivedCoreProperties.txt), but for the
#: selectors that only choose between an emoji's pictures.
_UNSEEN = (
    "\x00-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_RAW = re.compile(f"[{_UNSEEN}]")


def shown(text: str) -> str:
    r"""The text on one line; what cannot be seen stands there as Python writes it (`\n`, `\x1b`, `\u202e`)."""
    return _RAW.sub(_written, text)


def one_line(text: str) -> str:
    """The same of a message, whose line breaks mean no more than a blank."""
    return shown(" ".join(text.split()))


def shown_lines(text: str) -> str:
    """The same of text in several lines, which stay."""
    return "\n".join(map(shown, text.split("\n")))


def shown_json(text: str) -> str:
    """JSON of the same content in which everything can be seen."""
    return _RAW.sub(_in_json, text)


def _written(raw: re.Match[str]) -> str:
    return raw[0].encode("unicode_escape").decode()


def _in_json(raw: re.Match[str]) -> str:
    if raw[0] in "\n\t\r":
        # Between the tokens; within a string JSON has none.
        return raw[0]
    units = raw[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
