"""What each block of a history is for, and which part of the model it belongs to.

In lmbench's own recordings the notes say it, by address and moment; what they leave open, the phases in which the block
was allocated and freed say. In anybody else's, only the stacks do. No category is guessed by size: the rest is
`unknown`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from msgspec.structs import astuple

from lmbench.memory.categories import Category
from lmbench.memory.recorded import BACKWARD, MOMENT, WORKSPACES, MemoryNotes
from lmbench.memory.replay import BEFORE, Replay
from lmbench.memory.snapshot import Annotation, Snapshot
from lmbench.memory.stacks import StackRoles
from lmbench.records.intervals import Integers, locate, paint
from lmbench.records.vocabulary import MODULE, PHASE, STEP

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
#: What a block is first of all, where it is noted as several things: a saved tensor may be a parameter.
_RANKS: Sequence[Category] = ("parameters", "optimizer_state", "gradients", "inputs", "logits", "activations")
#: In the place of a category: what a repeated module returned.
_STREAM = "stream"


class Ranges:
    """Named ranges of time in us of Unix time, which may be nested: from `start` up to `end`."""

    def __init__(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        ranges = sorted(ranges, key=lambda named: named[1:])
        self.names = [name for name, _, _ in ranges]
        self.start = np.array([start for _, start, _ in ranges], np.int64)
        self.end = np.array([end for _, _, end in ranges], np.int64)
        self._pieces = paint(self.start, self.end)

    def __len__(self) -> int:
        return len(self.names)

    def at(self, time_us: Integers) -> Any:
        """The name of the innermost range around each moment, empty outside of all."""
        start, end, owner = self._pieces
        piece = locate(start, end, time_us)
        return np.array([*self.names, ""], object)[np.where(piece >= 0, np.append(owner, -1)[piece], -1)]

    def outermost(self) -> Ranges:
        """The ranges that lie in no other one."""
        kept: list[tuple[str, int, int]] = []
        for name, start, end in sorted(zip(self.names, self.start, self.end, strict=True), key=lambda r: (r[1], -r[2])):
            if not kept or start >= kept[-1][2]:
                kept.append((name, start, end))
        return Ranges(kept)


@dataclass(frozen=True)
class Bands:
    """The ranges of one device's history: steps, phases, modules in their forward, modules from the beginning of their
    backward to the next one's, and ranges of any other name, a stranger's `record_function`."""

    steps: Ranges
    phases: Ranges
    modules: Ranges
    backward: Ranges
    workspaces: Ranges
    others: Ranges
    #: When each moment of the notes was, by its index.
    moments: dict[int, int]


def bands_of(annotations: Iterable[Annotation], device: int) -> Bands:
    """The ranges of a device, by the annotations of a snapshot."""
    ranges: list[tuple[str, int, int]] = []
    # Ranges that are left open were cut off by an exception; ranges of different names may overlap.
    opened: defaultdict[str, list[int]] = defaultdict(list)
    for note in sorted((note for note in annotations if note.device == device), key=lambda note: note.time_us):
        if note.stage == "START":
            opened[note.name].append(note.time_us)
        elif opened[note.name]:
            ranges.append((note.name, opened[note.name].pop(), note.time_us))

    def of(prefix: str) -> Ranges:
        return Ranges((name[len(prefix) :], start, end) for name, start, end in ranges if name.startswith(prefix))

    phases, marks, marked = of(PHASE), of(BACKWARD), of(MOMENT)
    borders = np.unique(np.concatenate((marks.start, phases.start)))
    following = np.append(borders, np.iinfo(np.int64).max)[np.searchsorted(borders, marks.start, side="right")]
    return Bands(
        of(STEP), phases, of(MODULE), Ranges(zip(marks.names, marks.start.tolist(), following.tolist(), strict=True)),
        of(WORKSPACES), Ranges(named for named in ranges if not named[0].startswith("lmbench.")),
        {int(name): time for name, time in zip(marked.names, marked.start.tolist(), strict=True) if name.isdecimal()},
    )  # fmt: skip


@dataclass(frozen=True)
class Attribution:
    """The blocks of a replay with more columns: `category`, `owner` (the path of a module), the `phase` and `step` in
    which the block was allocated, and the `operator` that saved it; each empty where nobody knows.

    `unmatched` are noted storages that no block of the history holds; `streams` are the rows of what the
    model's repeated modules returned, each once.
    """

    blocks: Any
    bands: Bands
    unmatched: int = 0
    streams: Sequence[int] = ()


def attribute(snapshot: Snapshot, played: Replay, notes: MemoryNotes | None) -> Attribution:
    """Categories, owners and phases of a device's blocks."""
    bands, blocks = bands_of(snapshot.external_annotations, played.device), played.blocks
    start_us, end_us = played.clock(blocks["start"]), played.clock(blocks["end"])
    roles = StackRoles(played)
    if notes is None and not len(bands.phases):
        times = np.append(played.time_us, played.time_us[-1] + 1).tolist()
        bands = replace(bands, phases=Ranges((name, times[first], times[past]) for name, first, past in roles.phases()))
    module = bands.modules.at(start_us)
    # Autograd's thread has no ranges of modules: a gradient tells whose backward begins.
    columns = {
        "owner": np.where(module == "", bands.backward.at(start_us), module), "phase": bands.phases.at(start_us),
        "step": bands.steps.at(start_us),
    }  # fmt: skip
    blocks = blocks.assign(category="unknown", operator="", **columns).astype({"category": object, "operator": object})
    blocks.loc[blocks["start"] == BEFORE, list(columns)] = ""
    if notes is None:
        return Attribution(blocks.assign(category=roles.categories()), bands)
    noted = _noted(notes, bands, played)
    matched = noted[noted["block"] >= 0]
    streams = matched.loc[matched["category"] == _STREAM, "block"].unique().tolist()
    matched = matched[matched["category"] != _STREAM]
    rank = matched["category"].map({name: rank for rank, name in enumerate(_RANKS)}).fillna(len(_RANKS))
    first = matched.assign(rank=rank).sort_values("rank", kind="stable").drop_duplicates("block").set_index("block")
    blocks.loc[first.index, "category"] = first["category"]
    # An activation is saved by others than the module that made it.
    owned = first[(first["owner"] != "") & (first["category"] != "activations")]
    blocks.loc[owned.index, "owner"] = owned["owner"]
    saved = matched[matched["operator"] != ""].drop_duplicates("block").set_index("block")
    blocks.loc[saved.index, "operator"] = saved["operator"]
    is_open = (blocks["category"] == "unknown") & (blocks["end"] < played.entry_count)
    is_in_one_phase = (bands.phases.at(end_us) == blocks["phase"]) & (bands.steps.at(end_us) == blocks["step"])
    blocks.loc[is_open & is_in_one_phase & (blocks["phase"] != ""), "category"] = "temporaries"
    for start, end in zip(bands.workspaces.start, bands.workspaces.end, strict=True):
        blocks.loc[is_open & (end_us >= start) & (end_us <= end), "category"] = "workspaces"
    return Attribution(blocks, bands, int(((noted["block"] < 0) & (noted["category"] != _STREAM)).sum()), streams)


def _noted(notes: MemoryNotes, bands: Bands, played: Replay) -> Any:
    """The storages that the notes name, and with _STREAM as category what the outermost repeated modules returned.

    `block` is the row of the block that held the address at that moment, -1 where there was none.
    """
    # What lay at an address before a cut history begins, nobody knows; what stays is noted again at every step's end.
    is_cut = played.entry_count >= notes.max_entries > 0
    moments = [
        (time_us, notes.moments[index]) for index, time_us in bands.moments.items()
        if index < len(notes.moments) and not (is_cut and time_us < played.time_us[0])
    ]  # fmt: skip
    rows = [(time_us, *astuple(block)) for time_us, moment in moments for block in moment.blocks]
    rows += [
        (time_us, output.address, _STREAM, output.owner, "")
        for time_us, moment in moments for output in moment.outputs if block_of(output.owner) == output.owner
    ]  # fmt: skip
    noted = pd.DataFrame(rows, columns=["time_us", "address", "category", "owner", "operator"])
    blocks, limits = played.blocks, np.iinfo(np.int64)
    held = blocks[["address", "start"]].assign(
        begin_us=np.where(blocks["start"] == BEFORE, limits.min, played.clock(blocks["start"])),
        end_us=np.where(blocks["end"] == played.entry_count, limits.max, played.clock(blocks["end"])),
        block=blocks.index,
    )
    asked = noted[["time_us", "address"]].astype(np.int64).reset_index().sort_values("time_us", kind="stable")
    held = held.sort_values(["begin_us", "start"])
    latest = pd.merge_asof(asked, held, left_on="time_us", right_on="begin_us", by="address").set_index("index")
    block = latest["block"].where(latest["time_us"] <= latest["end_us"]).fillna(-1).astype(np.int64)
    return noted.assign(block=block)


def collapsed(owner: str) -> str:
    """A module's path with `*` for its indices: `blocks.3.attention.q` is one of `blocks.*.attention.q`."""
    return _INDEX.sub("*", owner)


def block_of(owner: str) -> str | None:
    """The path of the outermost indexed module around a module, such as `blocks.3`: None for what lies in none."""
    match = _INDEX.search(owner)
    return owner[: match.end()] if match else None
