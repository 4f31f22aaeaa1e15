"""The history replayed: when each block was held, and how much was at every moment.

What was there before the history began is known from its end: a block that is still held, or was freed, and never
allocated. So the sums are exact from the first entry on, also where older entries are lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from msgspec.structs import astuple

from lmbench.memory.blocks import BEFORE, held_bytes, rounded_bytes
from lmbench.memory.snapshot import NO_STACK, Block, Entry, Snapshot, Stack, different_stacks
from lmbench.records.intervals import Integers


@dataclass(frozen=True)
class Replay:
    """One device's history, as frames.

    `entries` has the `action`, `stack` (its place in `stacks`) and `time_us` of each entry, and how it was right after
    it: `allocated_bytes` with rounding, `requested_bytes` without, `reserved_bytes`; `pending_bytes` are in blocks that
    were given back while another stream still used them. Entries are the moments of `blocks` (see
    `lmbench.memory.blocks`), which have an `address`, `requested_bytes` and a `stack` too. `holes` are blocks whose
    allocation or freeing must have happened, and is not in the history. `segments` were reserved at the end: their
    `kind`, a `count` of 1, `total_bytes`, and `free_bytes` in no block, `largest_free_bytes` of them in one piece.
    """

    device: int
    has_history: bool
    entries: Any
    blocks: Any
    stacks: list[Stack]
    holes: int
    segments: Any

    def clock(self, entries: Any) -> Integers:
        """When entries were, in us; of an entry outside of the history, its border."""
        times: Integers = self.entries["time_us"].to_numpy()[np.clip(entries, 0, len(self.entries) - 1)]
        return times


def replay(snapshot: Snapshot, device: int) -> Replay:
    """The history of a device."""
    entries = snapshot.device_traces[device : device + 1]
    has_history = any(entries)
    # Without a history, what was held when the snapshot was taken is all that there is, as if after one entry.
    rows = map(astuple, entries[0] if has_history else [Entry("snapshot")])
    log = pd.DataFrame(rows, columns=Entry.__struct_fields__)
    segments = [segment for segment in snapshot.segments if segment.device == device]
    pieces = pd.DataFrame(
        [astuple(block) for segment in segments for block in segment.blocks], columns=Block.__struct_fields__
    )
    stacks, places = different_stacks([*log["stack"], *pieces["stack"]])
    log = log.assign(stack=places[: len(log)], start=log.index)
    held = pieces.assign(stack=places[len(log) :])[pieces["state"] == "active_allocated"]
    blocks, holes = _blocks(log, held.drop(columns="state").astype(np.int64))
    free = [[block.size_bytes for block in segment.blocks if block.state == "inactive"] for segment in segments]
    reserved = pd.DataFrame({
        "count": 1, "kind": ["expandable" if segment.is_expandable else segment.segment_type for segment in segments],
        "total_bytes": [segment.total_size for segment in segments], "free_bytes": [*map(sum, free)],
        "largest_free_bytes": [max(sizes, default=0) for sizes in free],
    })  # fmt: skip

    def summed(**shares: int) -> Any:
        """What the sizes of actions add up to after each entry."""
        return (log["requested_bytes"] * log["action"].map(shares).fillna(0).astype(np.int64)).cumsum()

    grown = summed(segment_alloc=1, segment_map=1, segment_free=-1, segment_unmap=-1)
    log = log[["action", "stack", "time_us"]].assign(
        allocated_bytes=held_bytes(blocks, len(log)),
        requested_bytes=held_bytes(blocks, len(log), "requested_bytes"),
        reserved_bytes=reserved["total_bytes"].sum() + grown - grown.iloc[-1],
        pending_bytes=summed(free_requested=1, free_completed=-1).clip(0),
    )
    return Replay(device, has_history, log, blocks, stacks, holes, reserved)


def _blocks(log: Any, held: Any) -> tuple[Any, int]:
    """Every block, and how many events are missing; `held` are the blocks that are there at the end."""
    # A block counts as allocated until it is given back; only where that is not noted, until it is free.
    freeing = "free_requested" if "free_requested" in set(log["action"]) else "free_completed"
    events = log[log["action"].isin(["alloc", freeing])].sort_values(["address", "start"])
    # An address is allocated and freed in turn.
    of_address, is_alloc = events.groupby("address"), events["action"] == "alloc"
    before, events["end"] = of_address["action"].shift(), of_address["start"].shift(-1).fillna(len(log))
    # The allocator says how large it took what is still held.
    taken = events["address"].map(held.drop_duplicates("address").set_index("address")["size_bytes"])
    taken = taken.where(events["end"] == len(log))
    events["size_bytes"] = taken.fillna(rounded_bytes(events["requested_bytes"]))
    older = events[~is_alloc & before.isna()]
    older = older.assign(start=BEFORE, end=older["start"], stack=NO_STACK)
    last = events.drop_duplicates("address", keep="last")
    is_held, ends_held = last["address"].isin(held["address"]), last["action"] == "alloc"
    # Freed or allocated twice in a row; held at the end and freed last, or the other way round.
    holes = int((events["action"] == before).sum() + (is_held != ends_held).sum())
    untouched = held[~held["address"].isin(last.loc[ends_held, "address"])].assign(start=BEFORE, end=len(log))
    parts = [part[list(untouched)] for part in (events[is_alloc], older, untouched)]
    return pd.concat(parts, ignore_index=True).astype(np.int64), holes
