"""The timelines of a section's profiled runs, as many as a page can carry, and the script that moves them."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path

from lmbench.report.cells import Cell, varying
from lmbench.report.facts import in_words, is_consequence
from lmbench.report.sections import Section
from lmbench.report.step_picture import StepPicture, step_picture
from lmbench.trace.step_timeline import TIMELINE_FILE, read_timeline

#: Of a whole page.
MAX_TIMELINES = 8
MAX_BYTES = 3_000_000


def script() -> str:
    """The script; it does nothing but draw what the page holds already."""
    return (files("lmbench.report") / "timeline.js").read_text(encoding="utf-8")


def script_hash(text: str) -> str:
    """What a content security policy calls this one script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


class Timelines:
    """Makes timelines until a page is full."""

    def __init__(self) -> None:
        self._count = self._bytes = 0

    def of(self, section: Section) -> tuple[list[StepPicture], int]:
        """One for each cell with a profiled run, and how many there was no room for."""
        found, left_out = [], 0
        names = [name for name in varying(section.cells) if not is_consequence(name)]
        for cell in section.cells:
            runs = [sample for sample in (*cell.samples, *cell.passes) if sample.is_profiled and sample.outcome == "ok"]
            for sample in runs[:1]:
                if not (sample.path / TIMELINE_FILE).is_file():
                    continue
                picture = self._fitting(sample.path, _title(cell, names))
                found += [picture] if picture else []
                left_out += picture is None
        return found, left_out

    def _fitting(self, path: Path, title: str) -> StepPicture | None:
        timeline = read_timeline(path) if self._count < MAX_TIMELINES else None
        if timeline is None:
            return None
        try:
            picture = step_picture(title, timeline)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            # Somebody changed the file by hand.
            return None
        size = len(picture.data) + len(picture.svg)
        if self._bytes + size > MAX_BYTES:
            return None
        self._count += 1
        self._bytes += size
        return picture


def _title(cell: Cell, names: list[str]) -> str:
    return ", ".join(in_words(n, cell.facts[n]) for n in names if cell.facts.get(n) is not None) or cell.name
