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

from lmbench.memory.allocator import ROUNDED_TO_BYTES
from lmbench.memory.snapshot import NO_STACK, Entry, Snapshot, Stack, different_stacks
from lmbench.records.intervals import Integers

#: A block's start before the first entry.
BEFORE = -1


@dataclass(frozen=True)
class Replay:
    """One device's history. The arrays say how it was right after each entry: `allocated_bytes` with rounding,
    `requested_bytes` without; `pending_bytes` are in blocks that were given back while another stream still used them.

    `blocks` is a frame with a row for each block: its `address`, `size_bytes` (as the allocator took it),
    `requested_bytes`, held from entry `start` (BEFORE the history) up to entry `end` (the number of entries: to the end
    and longer), and `stack` (its place in `stacks`). `holes` are blocks whose allocation or freeing must have
    happened, and is not in the history. `segments` is a frame of what was reserved at the end, a row for each: its
    `kind`, `total_bytes`, and `free_bytes` in no block, `largest_free_bytes` of them in one piece.
    """

    device: int
    has_history: bool
    actions: Any
    time_us: Integers
    blocks: Any
    stacks: list[Stack]
    allocated_bytes: Integers
    requested_bytes: Integers
    reserved_bytes: Integers
    pending_bytes: Integers
    holes: int
    segments: Any

    @property
    def free_bytes(self) -> int:
        return int(self.segments["free_bytes"].sum())

    @property
    def largest_free_bytes(self) -> int:
        return int(max(self.segments["largest_free_bytes"], default=0))

    @property
    def entry_count(self) -> int:
        return len(self.time_us)

    def held_at(self, entry: int) -> Any:
        """The rows of `blocks` that are held right after an entry, as flags."""
        return (self.blocks["start"] <= entry) & (self.blocks["end"] > entry)

    def clock(self, entries: Any) -> Integers:
        """When entries were, in us; of an entry outside of the history, its border."""
        times: Integers = self.time_us[np.clip(entries, 0, self.entry_count - 1)]
        return times


def replay(snapshot: Snapshot, device: int) -> Replay:
    """The history of a device."""
    names = ["action", "address", "requested_bytes", "time_us", "stack"]
    entries = snapshot.device_traces[device : device + 1]
    has_history = any(entries)
    # Without a history, what was held when the snapshot was taken is all that there is, as if after one entry.
    log = pd.DataFrame(map(astuple, entries[0] if has_history else [Entry("snapshot")]), columns=names)
    segments = [segment for segment in snapshot.segments if segment.device == device]
    names = ["address", "size_bytes", "state", "requested_bytes", "stack"]
    pieces = pd.DataFrame([astuple(block) for segment in segments for block in segment.blocks], columns=names)
    stacks, places = different_stacks([*log["stack"], *pieces["stack"]])
    log = log.assign(stack=places[: len(log)], entry=log.index)
    pieces = pieces.assign(stack=places[len(log) :])
    held = pieces[pieces["state"] == "active_allocated"].drop(columns="state").astype(np.int64)
    free = [[block.size for block in segment.blocks if block.state == "inactive"] for segment in segments]
    reserved = pd.DataFrame({
        "kind": ["expandable" if segment.is_expandable else segment.segment_type for segment in segments],
        "total_bytes": [segment.total_size for segment in segments], "free_bytes": [*map(sum, free)],
        "largest_free_bytes": [max(sizes, default=0) for sizes in free],
    })  # fmt: skip
    blocks, holes = _blocks(log, held)

    def summed(shares: dict[str, int]) -> Integers:
        """What the sizes of actions add up to after each entry."""
        sums = (log["requested_bytes"] * log["action"].map(shares).fillna(0).astype(np.int64)).cumsum()
        return np.asarray(sums)

    grown = summed({"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1})
    pending = summed({"free_requested": 1, "free_completed": -1})
    if not (log["action"] == "free_requested").any():
        pending = np.zeros_like(pending)
    return Replay(
        device, has_history, log[["action", "stack"]], log["time_us"].to_numpy(), blocks, stacks,
        held_bytes(blocks, len(log)), held_bytes(blocks, len(log), "requested_bytes"),
        reserved["total_bytes"].sum() - int(grown[-1]) + grown, np.maximum(pending, 0), holes, reserved,
    )  # fmt: skip


def held_bytes(blocks: Any, count: int, column: str = "size_bytes") -> Integers:
    """Sum of a column over the blocks that are held right after each of `count` entries."""
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, np.maximum(blocks["start"], 0), blocks[column])
    np.subtract.at(change, blocks["end"], blocks[column])
    held: Integers = np.cumsum(change[:-1])
    return held


def _blocks(log: Any, held: Any) -> tuple[Any, int]:
    """Every block, and how many events are missing; `held` are the blocks that are there at the end."""
    # A block counts as allocated until it is given back; only where that is not noted, until it is free.
    freeing = "free_requested" if (log["action"] == "free_requested").any() else "free_completed"
    events = log[log["action"].isin(["alloc", freeing])].sort_values(["address", "entry"])
    # An address is allocated and freed in turn.
    of_address, is_alloc = events.groupby("address"), events["action"] == "alloc"
    before = of_address["action"].shift()
    events = events.assign(
        start=events["entry"],
        end=of_address["entry"].shift(-1).fillna(len(log)).astype(np.int64),
    )
    # The allocator says how large it took what is still held.
    rounded = -(-events["requested_bytes"] // ROUNDED_TO_BYTES) * ROUNDED_TO_BYTES
    taken = events["address"].map(held.drop_duplicates("address").set_index("address")["size_bytes"])
    events["size_bytes"] = taken.where(events["end"] == len(log)).fillna(rounded).astype(np.int64)
    older = events[~is_alloc & before.isna()]
    older = older.assign(start=BEFORE, end=older["entry"], stack=NO_STACK)
    last = events.drop_duplicates("address", keep="last")
    is_held, ends_held = last["address"].isin(held["address"]), last["action"] == "alloc"
    # Freed or allocated twice in a row; held at the end and freed last, or the other way round.
    holes = int((events["action"] == before).sum() + (is_held != ends_held).sum())
    untouched = held[~held["address"].isin(last.loc[ends_held, "address"])]
    untouched = untouched.assign(start=BEFORE, end=len(log))
    parts = [events[is_alloc], older, untouched]
    return pd.concat([part[list(untouched)] for part in parts], ignore_index=True).astype(np.int64), holes
