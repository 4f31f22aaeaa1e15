"""A history as a picture needs it: what is held over time by category, and the blocks that make most of it; in a
small file of its own, so that a page never has to read the snapshot."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from lmbench.memory.categories import CATEGORIES, CATEGORY_LABELS, Category
from lmbench.memory.history.bands import NONE
from lmbench.memory.history.findings import Findings, frames_of
from lmbench.memory.history.replay import Flags, Integers, held_bytes
from lmbench.records.codec import DamagedRecord, decode

TIMELINE_FILE = "memory_timeline.json.gz"
#: A column of the picture is the moment of most memory among as many entries as the next.
MAX_COLUMNS = 480
#: Blocks that can be asked what they are: those with most memory times columns.
MAX_BLOCKS = 600
MAX_FRAMES = 12
_DEPTH = 60
#: Between a module and the one that calls it are three frames of this file, which tell nothing.
_CALLING = "/torch/nn/modules/module.py:"
MAX_BANDS = 200

#: From the bottom of the stack: what stays, then what comes and goes.
STACKED: tuple[Category, ...] = (
    "parameters", "optimizer_state", "gradients", "inputs", "workspaces", "unknown", "activations", "logits",
    "temporaries",
)  # fmt: skip

_Place = Annotated[int, Meta(ge=0)]


class TimelineBlock(Struct, array_like=True):
    """A block: columns in which it is held, bytes, and the places of its category, part, phase, operator and stack."""

    first: _Place
    last: _Place
    size_bytes: _Place
    category: _Place
    part: _Place
    phase: _Place
    operator: _Place
    stack: _Place


class TimelineBand(Struct, array_like=True):
    """A phase, or a stranger's range: from one column up to another."""

    name: str
    first: _Place
    end: _Place


class MemoryTimeline(Struct):
    """The history, column by column. `sizes_bytes` has for each category its bytes in every column; `time_us` counts
    from the first entry. Blocks of a category lie upon each other in the order in which they stand here."""

    schema_version: Literal[1]
    cuts: list[str]
    is_older_lost: bool
    categories: list[str]
    labels: list[str]
    sizes_bytes: list[list[_Place]]
    reserved_bytes: list[_Place]
    time_us: list[int]
    peak: _Place
    entry_count: int
    bands: list[TimelineBand]
    blocks: list[TimelineBlock]
    names: list[str]
    stacks: list[list[str]]


def memory_timeline(found: Findings) -> MemoryTimeline:
    """The picture's data."""
    played, told = found.played, found.attribution
    count = played.entry_count
    columns = min(count, MAX_COLUMNS)
    borders = np.linspace(0, count, columns + 1).astype(np.int64)
    moments = np.array(
        [start + int(np.argmax(played.allocated_bytes[start:end])) for start, end in _pairs(borders)], np.int64
    )
    categories = [name for name in STACKED if (told.category == CATEGORIES.index(name)).any()]
    sizes = [_held(found, told.category == CATEGORIES.index(name), moments) for name in categories]
    blocks, names, stacks = _blocks(found, moments, categories)
    return MemoryTimeline(
        1,
        found.cuts,
        found.is_older_lost,
        list(categories),
        [CATEGORY_LABELS[name] for name in categories],
        [column.tolist() for column in sizes],
        played.reserved_bytes[moments].tolist(),
        (played.time_us[moments] - played.time_us[0]).tolist(),
        int(np.searchsorted(borders, found.peak, side="right") - 1),
        count,
        _bands(found, borders),
        blocks,
        names,
        stacks,
    )


def _pairs(borders: Integers) -> Sequence[tuple[int, int]]:
    return list(pairwise(borders.tolist()))


def _held(found: Findings, chosen: Flags, moments: Integers) -> Integers:
    """Bytes of the chosen blocks right after each moment's entry."""
    blocks = found.played.blocks
    return np.asarray(held_bytes(blocks, np.where(chosen, blocks.size_bytes, 0), found.played.entry_count)[moments])


def _blocks(
    found: Findings, moments: Integers, categories: Sequence[Category]
) -> tuple[list[TimelineBlock], list[str], list[list[str]]]:
    """The blocks with most memory times columns; then the names and stacks that they refer to."""
    blocks, told, snapshot = found.played.blocks, found.attribution, found.snapshot
    # Held at a moment: begun up to its entry, and not ended by it.
    first = np.searchsorted(moments, blocks.start, side="left")
    last = np.searchsorted(moments, blocks.end, side="left") - 1
    area = np.where(last >= first, (last - first + 1) * blocks.size_bytes, 0)
    largest = np.argsort(-area, kind="stable")[:MAX_BLOCKS]
    chosen = sorted((int(place) for place in largest if area[place] > 0), key=lambda place: int(blocks.start[place]))
    names: dict[str, int] = {"": 0}
    stacks: dict[int, int] = {NONE: 0}
    rows = []
    for place in chosen:
        part = told.owners[told.owner[place]] if told.owner[place] != NONE else ""
        phase = told.bands.phase_at.names[told.phase[place]] if told.phase[place] != NONE else ""
        operator = told.operators[told.operator[place]] if told.operator[place] != NONE else ""
        rows.append(
            TimelineBlock(
                first=int(first[place]),
                last=int(last[place]),
                size_bytes=int(blocks.size_bytes[place]),
                category=categories.index(CATEGORIES[told.category[place]]),
                part=names.setdefault(part, len(names)),
                phase=names.setdefault(phase, len(names)),
                operator=names.setdefault(operator, len(names)),
                stack=stacks.setdefault(int(blocks.stack[place]), len(stacks)),
            )
        )
    return rows, list(names), [_telling(frames_of(snapshot, stack, _DEPTH)) for stack in stacks]


def _telling(frames: Iterable[str]) -> list[str]:
    return [frame for frame in frames if _CALLING not in frame][:MAX_FRAMES]


def _bands(found: Findings, borders: Integers) -> list[TimelineBand]:
    """Phases by column; of a stranger's history the outermost of its ranges."""
    bands = found.attribution.bands
    given = bands.phases
    if not given:
        given, end_us = [], 0
        for band in sorted(bands.others, key=lambda band: (band.start_us, -band.end_us)):
            if band.start_us >= end_us:
                given.append(band)
                end_us = band.end_us
    made = []
    for band in given:
        entries = np.searchsorted(found.played.time_us, [band.start_us, band.end_us])
        first, end = (int(column) for column in np.searchsorted(borders, entries, side="right") - 1)
        end = min(end, len(borders) - 1)
        if end > first:
            made.append(TimelineBand(band.name, max(first, 0), end))
    return made[:MAX_BANDS]


def write_timeline(timeline: MemoryTimeline, folder: Path) -> None:
    """Write it beside run.json. Raises OSError."""
    (folder / TIMELINE_FILE).write_bytes(gzip.compress(msgspec.json.encode(timeline), mtime=0))


def read_timeline(folder: Path) -> MemoryTimeline:
    """A run's timeline. Raises DamagedRecord, with one line, for a file that cannot be read or is none."""
    try:
        text = gzip.decompress((folder / TIMELINE_FILE).read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DamagedRecord(f"{TIMELINE_FILE} cannot be read or unpacked") from error
    timeline = decode(text, MemoryTimeline)
    columns = len(timeline.time_us)
    of_columns = [timeline.reserved_bytes, *timeline.sizes_bytes]
    listed = len(timeline.categories) == len(timeline.labels) == len(timeline.sizes_bytes)
    if not columns or not listed or any(len(column) != columns for column in of_columns) or timeline.peak >= columns:
        raise DamagedRecord("it is no timeline of memory: its columns are empty, or not of one length")
    for block in timeline.blocks:
        places = max(block.part, block.phase, block.operator)
        is_known = block.category < len(timeline.categories) and block.stack < len(timeline.stacks)
        if block.last >= columns or places >= len(timeline.names) or not is_known:
            raise DamagedRecord("it is no timeline of memory: a block refers to what is not there")
    return timeline
