"""The timelines of a section's profiled runs, as many as a page can carry, and the script that moves them."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from importlib.resources import files

from lmbench.kernels.shown.step_picture import StepPicture, step_picture
from lmbench.kernels.trace.step_timeline import TIMELINE_FILE, read_timeline
from lmbench.records.codec import DamagedRecord
from lmbench.report.cells import Cell, varying
from lmbench.report.facts import in_words, is_consequence
from lmbench.report.sample import Sample
from lmbench.report.sections import Section

#: Of a whole page.
MAX_TIMELINES = 8
MAX_BYTES = 3_000_000


def script() -> str:
    """The script; it does nothing but draw what the page holds already."""
    return (files("lmbench.report") / "timeline.js").read_text(encoding="utf-8")


def script_hash(text: str) -> str:
    """What a content security policy calls this one script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@dataclass
class Drawn:
    """Timelines of a section: the pictures, how many there was no room for, and runs whose file cannot be read."""

    pictures: list[StepPicture] = field(default_factory=list)
    left_out: int = 0
    unreadable: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """What is said below the pictures."""
        found = []
        if self.left_out:
            found.append(f"{_count(self.left_out)} left out: the page would become too large.")
        if self.unreadable:
            found.append(
                f"{_count(len(self.unreadable))} not shown, as the file cannot be used: {', '.join(self.unreadable)}."
            )
        return found


def _count(number: int) -> str:
    return "1 more timeline is" if number == 1 else f"{number} more timelines are"


class Timelines:
    """Makes timelines until a page is full."""

    def __init__(self) -> None:
        self._count = self._bytes = 0

    def of(self, section: Section) -> Drawn:
        """One for each cell with a profiled run that has one."""
        found = Drawn()
        names = [name for name in varying(section.cells) if not is_consequence(name)]
        for cell in section.cells:
            runs = [sample for sample in (*cell.samples, *cell.passes) if sample.is_profiled and sample.outcome == "ok"]
            for sample in runs[:1]:
                if (sample.path / TIMELINE_FILE).is_file():
                    self._add(found, sample, _title(cell, names))
        return found

    def _add(self, found: Drawn, sample: Sample, title: str) -> None:
        try:
            timeline = read_timeline(sample.path)
        except DamagedRecord as error:
            # Torn by a kill, or somebody changed the file by hand.
            found.unreadable.append(f"{sample.run_id} ({error})")
            return
        if self._count >= MAX_TIMELINES:
            found.left_out += 1
            return
        picture = step_picture(title, timeline)
        size = len(picture.data) + len(picture.svg)
        if self._bytes + size > MAX_BYTES:
            found.left_out += 1
            return
        self._count += 1
        self._bytes += size
        found.pictures.append(picture)


def _title(cell: Cell, names: list[str]) -> str:
    return ", ".join(in_words(n, cell.facts[n]) for n in names if cell.facts.get(n) is not None) or cell.name
