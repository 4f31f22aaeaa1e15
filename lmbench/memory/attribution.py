"""What each block of a history is for, and which part of the model it belongs to.

In lmbench's own recordings the notes say it, by address and moment; what they leave open, the phases in which the block
was allocated and freed say. In anybody else's, only the stacks do. No category is guessed by size: the rest is
`unknown`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from msgspec.structs import astuple

from lmbench.memory.blocks import BEFORE
from lmbench.memory.recorded import BACKWARD, MOMENT, WORKSPACES, MemoryNotes, NotedBlock
from lmbench.memory.replay import Replay
from lmbench.memory.snapshot import Annotation, Snapshot
from lmbench.memory.stacks import stack_roles
from lmbench.records.intervals import Integers, locate, paint
from lmbench.records.vocabulary import MODULE, PHASE, STEP

#: In the place of what names of ranges begin with: of those that a stranger's `record_function` made.
OTHERS = ""
#: What a block is first of all, where it is noted as several things: a saved tensor may be a parameter.
_RANKS = (
    "parameters", "optimizer_state", "gradients", "inputs", "logits", "activations", "temporaries", "workspaces",
    "unknown", "stream",
)  # fmt: skip
_LIMITS = np.iinfo(np.int64)


class Ranges:
    """Named ranges of time in us of Unix time, which may be nested: from `start` up to `end`.

    `pieces` are the ranges without what inner ones take of them, in order.
    """

    def __init__(self, ranges: Iterable[Any]) -> None:
        frame = pd.DataFrame(ranges, columns=["name", "start", "end"]).astype({"start": np.int64, "end": np.int64})
        frame = frame.sort_values(["start", "end"], kind="stable")
        self.names = frame["name"].tolist()
        self.start, self.end = frame["start"].to_numpy(), frame["end"].to_numpy()
        self._start, self._end, owner = paint(self.start, self.end)
        self._owners = [self.names[index] for index in owner]
        self.pieces = list(zip(self._owners, self._start.tolist(), self._end.tolist(), strict=True))

    def at(self, time_us: Integers) -> Any:
        """The name of the innermost range around each moment, empty outside of all."""
        return np.array([*self._owners, ""], object)[locate(self._start, self._end, time_us)]


def bands_of(annotations: Iterable[Annotation], device: int) -> dict[str, Ranges]:
    """The ranges of a device by what their names begin with, and in OTHERS those that are not lmbench's.

    BACKWARD has modules from the beginning of their backward to the next one's.
    """
    ranges: list[tuple[str, int, int]] = []
    # Ranges that are left open were cut off by an exception; ranges of different names may overlap.
    opened = defaultdict[str, list[int]](list)
    for note in sorted((note for note in annotations if note.device == device), key=lambda note: note.time_us):
        if note.stage == "START":
            opened[note.name].append(note.time_us)
        elif opened[note.name]:
            ranges.append((note.name, opened[note.name].pop(), note.time_us))
    bands = {
        prefix: Ranges((name[len(prefix) :], *span) for name, *span in ranges if name.startswith(prefix))
        for prefix in (STEP, PHASE, MODULE, BACKWARD, MOMENT, WORKSPACES)
    }
    bands[OTHERS] = Ranges(named for named in ranges if not named[0].startswith("lmbench."))
    begun = bands[BACKWARD]
    borders = np.unique([*begun.start, *bands[PHASE].start, _LIMITS.max])
    following = borders[np.searchsorted(borders, begun.start, side="right")]
    bands[BACKWARD] = Ranges(zip(begun.names, begun.start, following, strict=True))
    return bands


def attribute(snapshot: Snapshot, played: Replay, notes: MemoryNotes | None) -> tuple[Any, dict[str, Ranges]]:
    """The blocks of a replay with more columns, and the ranges of its device (see bands_of).

    The columns: `category`, `owner` (the path of a module), the `phase` and `step` in which the block was allocated,
    and the `operator` that saved it; each empty where nobody knows; `is_stream` of what one of the model's alike
    modules returned.
    """
    bands, blocks = bands_of(snapshot.external_annotations, played.device), played.blocks
    start_us, end_us = played.clock(blocks["start"]), played.clock(blocks["end"])
    category: Any = "unknown"
    if notes is None:
        category, phases = stack_roles(played)
        if not bands[PHASE].names:
            times = [*played.entries["time_us"], played.entries["time_us"].iloc[-1] + 1]
            bands[PHASE] = Ranges((name, times[first], times[past]) for name, first, past in phases)
    module = bands[MODULE].at(start_us)
    # Autograd's thread has no ranges of modules: a gradient tells whose backward begins.
    columns = {
        "owner": np.where(module == "", bands[BACKWARD].at(start_us), module), "phase": bands[PHASE].at(start_us),
        "step": bands[STEP].at(start_us), "operator": "",
    }  # fmt: skip
    blocks = blocks.assign(is_stream=False, category=category, **columns).astype({"operator": object})
    blocks.loc[blocks["start"] == BEFORE, list(columns)] = ""
    if notes is None:
        return blocks, bands
    noted = _noted(notes, bands[MOMENT], played)
    is_stream = noted["category"] == "stream"
    blocks.loc[noted.loc[is_stream, "block"], "is_stream"] = True
    noted = noted.assign(rank=noted["category"].map(_RANKS.index))[~is_stream]
    first = noted.sort_values("rank", kind="stable").drop_duplicates("block").set_index("block")
    blocks["category"] = first["category"].reindex(blocks.index, fill_value="unknown").astype(object)
    # An activation is saved by others than the module that made it.
    owned = first[(first["owner"] != "") & (first["category"] != "activations")]
    saved = noted[noted["operator"] != ""].drop_duplicates("block").set_index("block")
    for column, known in (("owner", owned), ("operator", saved)):
        blocks.loc[known.index, column] = known[column]
    is_open = (blocks["category"] == "unknown") & (blocks["end"] < len(played.entries))
    is_in_one_phase = (bands[PHASE].at(end_us) == blocks["phase"]) & (bands[STEP].at(end_us) == blocks["step"])
    blocks.loc[is_open & is_in_one_phase & (blocks["phase"] != ""), "category"] = "temporaries"
    for _, start, end in bands[WORKSPACES].pieces:
        blocks.loc[is_open & (end_us >= start) & (end_us <= end), "category"] = "workspaces"
    return blocks, bands


def _noted(notes: MemoryNotes, moments: Ranges, played: Replay) -> Any:
    """The storages that the notes name; `block` is the row of the block that held the address at that moment."""
    # What lay at an address before a cut history begins, nobody knows; what stays is noted again at every step's end.
    begin_us = _LIMITS.min
    if len(played.entries) >= notes.max_entries > 0:
        begin_us = played.entries["time_us"].iloc[0]
    rows = [
        (time_us, *astuple(block))
        for name, time_us in zip(moments.names, moments.start, strict=True)
        if name.isdecimal() and int(name) < len(notes.moments) and time_us >= begin_us
        for block in notes.moments[int(name)]
    ]
    noted = pd.DataFrame(rows, columns=["time_us", *NotedBlock.__struct_fields__])
    noted = noted.astype({"time_us": np.int64, "address": np.int64}).reset_index()
    blocks = played.blocks
    held = blocks[["address", "start"]].assign(
        begin_us=np.where(blocks["start"] == BEFORE, _LIMITS.min, played.clock(blocks["start"])),
        end_us=np.where(blocks["end"] == len(played.entries), _LIMITS.max, played.clock(blocks["end"])),
        block=blocks.index,
    )
    latest = pd.merge_asof(
        noted.sort_values("time_us", kind="stable"), held.sort_values(["begin_us", "start"]),
        left_on="time_us", right_on="begin_us", by="address",
    )  # fmt: skip
    return latest[latest["time_us"] <= latest["end_us"]].astype({"block": np.int64}).sort_values("index")
