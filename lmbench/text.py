"""Text that somebody else wrote (a kernel's name, a setting, a path, a message), fit to be shown.

A terminal obeys control characters, and a mark of direction turns around what follows it. Whatever was read from a
file, a command line or a process goes through here on its way to a screen, a table or a page.
"""

from __future__ import annotations

import json
from collections.abc import Callable


def shown(text: str) -> str:
    r"""The text on one line, its unprintable characters (`str.isprintable`) as Python writes them: `\n`, `\x1b`."""
    return _replace_unprintable(text, lambda character: character.encode("unicode_escape").decode())


def one_line(text: str) -> str:
    """A message as one line of printable characters; its line breaks mean no more than a blank."""
    return shown(" ".join(text.split()))


def shown_lines(text: str) -> str:
    """Text in several lines, each fit to be shown."""
    return "\n".join(map(shown, text.split("\n")))


def shown_json(text: str) -> str:
    """JSON of the same content, with unprintable characters escaped."""
    return "\n".join(
        _replace_unprintable(line, lambda character: json.dumps(character)[1:-1]) for line in text.split("\n")
    )


def _replace_unprintable(text: str, escape: Callable[[str], str]) -> str:
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else escape(character) for character in text)
