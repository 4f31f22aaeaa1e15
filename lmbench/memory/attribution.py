"""What each block of a history is for, and which part of the model it belongs to.

In lmbench's own recordings the notes say it, by address and moment; what they leave open, the phases in which the block
was allocated and freed say. In anybody else's, only the stacks do. No category is guessed by size: the rest is
`unknown`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from msgspec.structs import astuple

from lmbench.memory.recorded import BACKWARD, MOMENT, WORKSPACES, Category, MemoryNotes
from lmbench.memory.replay import BEFORE, Replay
from lmbench.memory.snapshot import Annotation, Snapshot
from lmbench.memory.stacks import StackRoles
from lmbench.records.intervals import Integers, locate, paint
from lmbench.records.vocabulary import MODULE, PHASE, STEP

#: In the place of what names of ranges begin with: of those that a stranger's `record_function` made.
OTHERS = ""
#: What a block is first of all, where it is noted as several things: a saved tensor may be a parameter.
_RANKS: Sequence[Category] = ("parameters", "optimizer_state", "gradients", "inputs", "logits", "activations")


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

    @property
    def pieces(self) -> list[tuple[str, int, int]]:
        """The ranges without what inner ones take of them, in order."""
        start, end, owner = self._pieces
        return [(self.names[index], *edges) for index, *edges in zip(owner, start.tolist(), end.tolist(), strict=True)]


def bands_of(annotations: Iterable[Annotation], device: int) -> dict[str, Ranges]:
    """The ranges of a device by what their names begin with, and in OTHERS those that are not lmbench's.

    BACKWARD has modules from the beginning of their backward to the next one's.
    """
    ranges: list[tuple[str, int, int]] = []
    # Ranges that are left open were cut off by an exception; ranges of different names may overlap.
    opened: defaultdict[str, list[int]] = defaultdict(list)
    for note in sorted((note for note in annotations if note.device == device), key=lambda note: note.time_us):
        if note.stage == "START":
            opened[note.name].append(note.time_us)
        elif opened[note.name]:
            ranges.append((note.name, opened[note.name].pop(), note.time_us))
    bands = {
        prefix: Ranges((name[len(prefix) :], start, end) for name, start, end in ranges if name.startswith(prefix))
        for prefix in (STEP, PHASE, MODULE, BACKWARD, MOMENT, WORKSPACES)
    }
    bands[OTHERS] = Ranges(named for named in ranges if not named[0].startswith("lmbench."))
    begun = bands[BACKWARD]
    borders = np.unique(np.concatenate((begun.start, bands[PHASE].start)))
    following = np.append(borders, np.iinfo(np.int64).max)[np.searchsorted(borders, begun.start, side="right")]
    bands[BACKWARD] = Ranges(zip(begun.names, begun.start.tolist(), following.tolist(), strict=True))
    return bands


def attribute(snapshot: Snapshot, played: Replay, notes: MemoryNotes | None) -> tuple[Any, Mapping[str, Ranges], int]:
    """The blocks of a replay with more columns, the ranges of its device (see bands_of), and how many noted storages no
    block of the history holds.

    The columns: `category`, `owner` (the path of a module), the `phase` and `step` in which the block was allocated,
    and the `operator` that saved it; each empty where nobody knows; `is_stream` of what one of the model's alike
    modules returned.
    """
    bands, blocks = bands_of(snapshot.external_annotations, played.device), played.blocks
    start_us, end_us = played.clock(blocks["start"]), played.clock(blocks["end"])
    if notes is None:
        roles = StackRoles(played)
        blocks = blocks.assign(category=roles.categories)
        if not len(bands[PHASE]):
            times = np.append(played.time_us, played.time_us[-1] + 1).tolist()
            bands[PHASE] = Ranges((name, times[first], times[past]) for name, first, past in roles.phases())
    module = bands[MODULE].at(start_us)
    # Autograd's thread has no ranges of modules: a gradient tells whose backward begins.
    columns = {
        "owner": np.where(module == "", bands[BACKWARD].at(start_us), module), "phase": bands[PHASE].at(start_us),
        "step": bands[STEP].at(start_us),
    }  # fmt: skip
    blocks = blocks.assign(operator="", is_stream=False, **columns).astype({"operator": object})
    blocks.loc[blocks["start"] == BEFORE, list(columns)] = ""
    if notes is None:
        return blocks, bands, 0
    noted = _noted(notes, bands[MOMENT], played)
    is_stream, is_matched = noted["category"] == "stream", noted["block"] >= 0
    blocks.loc[noted.loc[is_stream & is_matched, "block"], "is_stream"] = True
    matched = noted[is_matched & ~is_stream]
    rank = matched["category"].map({name: rank for rank, name in enumerate(_RANKS)}).fillna(len(_RANKS))
    first = matched.assign(rank=rank).sort_values("rank", kind="stable").drop_duplicates("block").set_index("block")
    blocks["category"] = first["category"].reindex(blocks.index, fill_value="unknown").astype(object)
    # An activation is saved by others than the module that made it.
    owned = first[(first["owner"] != "") & (first["category"] != "activations")]
    blocks.loc[owned.index, "owner"] = owned["owner"]
    saved = matched[matched["operator"] != ""].drop_duplicates("block").set_index("block")
    blocks.loc[saved.index, "operator"] = saved["operator"]
    is_open = (blocks["category"] == "unknown") & (blocks["end"] < played.entry_count)
    is_in_one_phase = (bands[PHASE].at(end_us) == blocks["phase"]) & (bands[STEP].at(end_us) == blocks["step"])
    blocks.loc[is_open & is_in_one_phase & (blocks["phase"] != ""), "category"] = "temporaries"
    for _, start, end in bands[WORKSPACES].pieces:
        blocks.loc[is_open & (end_us >= start) & (end_us <= end), "category"] = "workspaces"
    return blocks, bands, int((~is_matched & ~is_stream).sum())


def _noted(notes: MemoryNotes, moments: Ranges, played: Replay) -> Any:
    """The storages that the notes name; `block` is the row of the block that held the address at that moment, -1 where
    there was none."""
    # What lay at an address before a cut history begins, nobody knows; what stays is noted again at every step's end.
    is_cut = played.entry_count >= notes.max_entries > 0
    rows = [
        (time_us, *astuple(block))
        for name, time_us in zip(moments.names, moments.start.tolist(), strict=True)
        if name.isdecimal() and int(name) < len(notes.moments) and not (is_cut and time_us < played.time_us[0])
        for block in notes.moments[int(name)]
    ]
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
