"""Which step, phase and module an entry of the history lies in: by the ranges that were open, on the history's own
clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lmbench.memory.history.replay import Integers
from lmbench.memory.history.snapshot import Annotation
from lmbench.memory.recorded import BACKWARD, MOMENT, WORKSPACES
from lmbench.records.vocabulary import MODULE, PHASE, STEP

#: The index of no name.
NONE = -1


@dataclass(frozen=True)
class Band:
    """A range: from its start up to its end, in us of Unix time."""

    name: str
    start_us: int
    end_us: int


@dataclass(frozen=True)
class Pieces:
    """Time cut where ranges begin and end: from `start_us[i]` on, the innermost range's name is `names[index[i]]`."""

    start_us: Integers
    index: Integers
    names: list[str]

    def at(self, time_us: Integers) -> Integers:
        """The index of the innermost range's name at each moment, NONE outside of all."""
        if not len(self.start_us):
            return np.full(len(time_us), NONE)
        place = np.searchsorted(self.start_us, time_us, side="right") - 1
        return np.where(place < 0, NONE, self.index[np.maximum(place, 0)])


class Bands:
    """The ranges of one device's history."""

    def __init__(self, annotations: Sequence[Annotation], device: int) -> None:
        own = sorted((each for each in annotations if each.device == device), key=lambda each: each.time_us)
        self.steps = list(_bands(own, STEP))
        self.workspaces = list(_bands(own, WORKSPACES))
        self.phases = list(_bands(own, PHASE))
        #: Ranges of any other name, from the outermost: a stranger's `record_function`.
        self.others = list(_others(own))
        self.phase_at = _pieces(own, PHASE)
        self.step_at = _pieces(own, STEP)
        self.module_at = _pieces(own, MODULE)
        self.backward_at = _since(own, BACKWARD, {band.start_us for band in self.phases})
        #: When each moment of the notes was, by its index.
        self.moments = {
            int(each.name[len(MOMENT) :]): each.time_us
            for each in own
            if each.is_start and each.name.startswith(MOMENT) and each.name[len(MOMENT) :].isdecimal()
        }

    def forget_moments_before(self, time_us: int) -> None:
        """Leave only the moments from a time on."""
        self.moments = {place: at_us for place, at_us in self.moments.items() if at_us >= time_us}

    @property
    def is_own(self) -> bool:
        """Whether lmbench set the ranges."""
        return bool(self.phases)


def _since(annotations: Iterable[Annotation], prefix: str, ends_us: set[int]) -> Pieces:
    """From each empty range of a kind to the next one, or to one of the ends."""
    names: dict[str, int] = {}
    marks = [
        (each.time_us, names.setdefault(each.name[len(prefix) :], len(names)))
        for each in annotations
        if each.is_start and each.name.startswith(prefix)
    ]
    pieces = sorted([*marks, *((end_us, NONE) for end_us in ends_us)])
    start_us, index = (np.array([piece[place] for piece in pieces], np.int64) for place in (0, 1))
    return Pieces(start_us, index, list(names))


def _bands(annotations: Iterable[Annotation], prefix: str) -> Iterable[Band]:
    """Ranges of one kind, which are never nested."""
    opened: Annotation | None = None
    for each in annotations:
        if not each.name.startswith(prefix):
            continue
        if each.is_start:
            opened = each
        elif opened is not None and opened.name == each.name:
            yield Band(each.name[len(prefix) :], opened.time_us, each.time_us)
            opened = None


def _others(annotations: Sequence[Annotation]) -> Iterable[Band]:
    opened: list[Annotation] = []
    for each in annotations:
        if each.name.startswith("lmbench."):
            continue
        if each.is_start:
            opened.append(each)
        else:
            place = next((i for i in reversed(range(len(opened))) if opened[i].name == each.name), None)
            if place is not None:
                yield Band(each.name, opened[place].time_us, each.time_us)
                del opened[place:]


def _pieces(annotations: Iterable[Annotation], prefix: str) -> Pieces:
    names: dict[str, int] = {}
    opened: list[str] = []
    starts: list[int] = []
    index: list[int] = []
    for each in annotations:
        if not each.name.startswith(prefix):
            continue
        name = each.name[len(prefix) :]
        if each.is_start:
            opened.append(name)
        elif name in opened:
            # What is left open inside was cut off by an exception.
            del opened[len(opened) - 1 - opened[::-1].index(name) :]
        starts.append(each.time_us)
        index.append(names.setdefault(opened[-1], len(names)) if opened else NONE)
    return Pieces(np.array(starts, np.int64), np.array(index, np.int64), list(names))
