"""The history replayed: when each block was held, and how much was at every moment.

What was there before the history began is known from its end: a block that is still held, or was freed, and never
allocated. So the sums are exact from the first entry on, also where older entries are lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lmbench.memory.allocator import ROUNDED_TO_BYTES
from lmbench.memory.snapshot import NO_STACK, Block, Snapshot, Stacks
from lmbench.records.intervals import Integers

_SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
#: A block's start before the first entry.
BEFORE = -1


@dataclass(frozen=True)
class Replay:
    """One device's history. The arrays say how it was right after each entry: `allocated_bytes` with rounding,
    `requested_bytes` without; `pending_bytes` are in blocks that were given back while another stream still used them.

    `blocks` is a frame with a row for each block: its `address`, `size_bytes` (as the allocator took it),
    `requested_bytes`, held from entry `start` (BEFORE the history) up to entry `end` (the number of entries: to the end
    and longer), `stack` and `free_stack` (places in `stacks`). `holes` are blocks whose allocation or freeing must have
    happened, and is not in the history. `free_bytes` were in no block at the end, `largest_free_bytes` in one piece.
    """

    device: int
    actions: Any
    time_us: Integers
    blocks: Any
    stacks: Stacks
    allocated_bytes: Integers
    requested_bytes: Integers
    reserved_bytes: Integers
    pending_bytes: Integers
    holes: int
    free_bytes: int
    largest_free_bytes: int

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
    """The history of a device that has one."""
    entries, stacks = snapshot.device_traces[device], Stacks()
    log = pd.DataFrame({
        "action": [entry.action for entry in entries], "address": _integers(entry.addr for entry in entries),
        "requested_bytes": _integers(entry.size for entry in entries),
        "stack": stacks.places(entry.frames for entry in entries), "entry": np.arange(len(entries)),
    })  # fmt: skip
    segments = [segment for segment in snapshot.segments if segment.device == device]
    pieces = [block for segment in segments for block in segment.blocks]
    blocks, holes = _blocks(log, [block for block in pieces if block.state == "active_allocated"], stacks)
    size = log["requested_bytes"]
    pending = size.where(log["action"] == "free_requested", 0) - size.where(log["action"] == "free_completed", 0)
    if not (log["action"] == "free_requested").any():
        pending = pending * 0
    grown = (size * log["action"].map(_SEGMENTS).fillna(0).astype(np.int64)).cumsum().to_numpy()
    free = [block.size for block in pieces if block.state == "inactive"]
    return Replay(
        device, log[["action", "stack"]], _integers(entry.time_us for entry in entries), blocks, stacks,
        held_bytes(blocks, len(log)), held_bytes(blocks, len(log), "requested_bytes"),
        sum(segment.total_size for segment in segments) - int(grown[-1]) + grown,
        np.maximum(pending.cumsum().to_numpy(), 0), holes, sum(free), max(free, default=0),
    )  # fmt: skip


def held_bytes(blocks: Any, count: int, column: str = "size_bytes") -> Integers:
    """Sum of a column over the blocks that are held right after each of `count` entries."""
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, np.maximum(blocks["start"], 0), blocks[column])
    np.subtract.at(change, blocks["end"], blocks[column])
    held: Integers = np.cumsum(change[:-1])
    return held


def _integers(values: Iterable[int]) -> Integers:
    return np.fromiter(values, np.int64)


def _blocks(log: Any, held: list[Block], stacks: Stacks) -> tuple[Any, int]:
    """Every block, and how many events are missing."""
    # A block counts as allocated until it is given back; only where that is not noted, until it is free.
    is_requested = (log["action"] == "free_requested").any()
    events = log[log["action"].isin(["alloc", "free_requested" if is_requested else "free_completed"])]
    events = events.sort_values(["address", "entry"])
    is_alloc = events["action"] == "alloc"
    # Whether an event of the same address is before it, and behind it.
    follows = events["address"] == events["address"].shift(fill_value=-1)
    continues = follows.shift(-1, fill_value=False)
    follows_alloc = follows & is_alloc.shift(fill_value=False)
    is_freed = continues & ~is_alloc.shift(-1, fill_value=False)
    events = events.assign(
        size_bytes=-(-events["requested_bytes"] // ROUNDED_TO_BYTES) * ROUNDED_TO_BYTES,
        start=events["entry"],
        end=events["entry"].shift(-1, fill_value=0).where(continues, len(log)),
        free_stack=events["stack"].shift(-1, fill_value=NO_STACK).where(is_freed, NO_STACK),
    )
    at_end = pd.DataFrame({
        "address": [block.address for block in held], "size_bytes": [block.size for block in held],
        "requested_bytes": [block.requested_size for block in held],
        "stack": stacks.places(block.frames for block in held),
        "start": BEFORE, "end": len(log), "free_stack": NO_STACK,
    }).astype(np.int64)  # fmt: skip
    born = events[is_alloc]
    # The allocator says how large it took what is still held.
    taken = born["address"].map(at_end.drop_duplicates("address").set_index("address")["size_bytes"])
    born = born.assign(size_bytes=taken.where(born["end"] == len(log)).fillna(born["size_bytes"]).astype(np.int64))
    older = events[~is_alloc & ~follows]
    older = older.assign(start=BEFORE, end=older["entry"], free_stack=older["stack"], stack=NO_STACK)
    last_alloc = events.loc[~continues & is_alloc, "address"]
    last_freed = events.loc[~continues & ~is_alloc, "address"]
    holes = (
        # Freed twice, or allocated twice.
        (~is_alloc & follows & ~follows_alloc).sum() + (is_alloc & follows_alloc).sum()
        # Allocated last, and not held at the end: its freeing is missing. Held, and freed last: its allocation is.
        + (~last_alloc.isin(at_end["address"])).sum() + at_end["address"].isin(last_freed).sum()
    )  # fmt: skip
    parts = [born, older, at_end[~at_end["address"].isin(last_alloc)]]
    return pd.concat([part[list(at_end)] for part in parts], ignore_index=True), int(holes)
