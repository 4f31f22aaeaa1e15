"""The guide: pages of Markdown, shown by `lmbench guide`, on GitHub and as a site. `index.md` lists the others."""

from __future__ import annotations

import re
from importlib.resources import files
from inspect import cleandoc

from lmbench.rooms import INSTALLED

INDEX = "index"


def topics() -> list[str]:
    """Names of the pages, in the order in which the index links to them."""
    return list(dict.fromkeys(re.findall(r"\]\((\w+)\.md\)", text(INDEX))))


def text(topic: str) -> str:
    """A page's Markdown as its file or a room of an installed package has it; the index also links to such rooms."""
    rooms = {room.name: room for room in INSTALLED if room.guide}
    if topic in rooms:
        return cleandoc(rooms[topic].load("guide")) + "\n"
    links = [f"- [{name}]({name}.md): a room of an installed package\n" for name in rooms if topic == INDEX]
    return "".join([(files(__name__) / f"{topic}.md").read_text("utf-8"), *links])
