"""The history replayed: when each block was held, and how much was at every moment.

What was there before the history began is known from its end: a block that is still held, or was freed, and never
allocated. So the sums are exact from the first entry on, also where older entries are lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmbench.errors import UsageError
from lmbench.memory.history.snapshot import ACTIONS, NO_STACK, Snapshot

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_ALLOC, _FREE_REQUESTED, _FREE_COMPLETED = (ACTIONS.index(name) for name in ACTIONS[:3])
_GROWS = [ACTIONS.index("segment_alloc"), ACTIONS.index("segment_map")]
_SHRINKS = [ACTIONS.index("segment_free"), ACTIONS.index("segment_unmap")]
#: The allocator hands out multiples of this (c10/core/CachingDeviceAllocator.h, kMinBlockSize).
ROUNDING = 512
#: A block's start before the first entry.
BEFORE = -1


@dataclass(frozen=True)
class Blocks:
    """Every block of the history, a row each: held from entry `start` (BEFORE the history) up to entry `end` (the
    number of entries: to the end and longer). `size_bytes` is what the allocator took for it: asked for, and
    rounded."""

    address: Integers
    size_bytes: Integers
    requested_bytes: Integers
    start: Integers
    end: Integers
    stack: Integers
    free_stack: Integers

    def __len__(self) -> int:
        return len(self.address)

    def held_at(self, entry: int) -> Flags:
        """Which blocks are held right after an entry."""
        return (self.start <= entry) & (self.end > entry)


@dataclass(frozen=True)
class Replay:
    """One device's history, right after each entry: `allocated_bytes` with rounding, `requested_bytes` without;
    `pending_bytes` are in blocks that were given back while another stream still used them.

    `holes` are blocks whose allocation or freeing must have happened, and is not in the history.
    """

    device: int
    time_us: Integers
    blocks: Blocks
    allocated_bytes: Integers
    requested_bytes: Integers
    reserved_bytes: Integers
    pending_bytes: Integers
    holes: int

    @property
    def entry_count(self) -> int:
        return len(self.time_us)

    @property
    def peak(self) -> int:
        """The entry right after which most was allocated."""
        return int(np.argmax(self.allocated_bytes))


def devices_of(snapshot: Snapshot) -> list[int]:
    """Devices that have a history or memory."""
    with_history = {device for device, trace in enumerate(snapshot.traces) if trace.count}
    return sorted(with_history or set(snapshot.segments.device))


def choose_device(snapshot: Snapshot, asked: int | None) -> int:
    """The device to look at.

    Raises:
        UsageError: that device has no history, or several have and none was asked for.
    """
    present = [device for device, trace in enumerate(snapshot.traces) if trace.count]
    if not present:
        raise UsageError(
            "this snapshot has no history, only what was held when it was taken: call "
            "torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks='python') before the steps"
        )
    known = ", ".join(map(str, present))
    if asked is None:
        if len(present) > 1:
            raise UsageError(f"this snapshot has the history of several devices; name one: --device {known}")
        return present[0]
    if asked not in present:
        raise UsageError(f"--device {asked} has no history in this snapshot; devices with one: {known}")
    return asked


def replay(snapshot: Snapshot, device: int) -> Replay:
    """The history of a device that has one."""
    trace = snapshot.traces[device]
    action = np.frombuffer(trace.action, np.uint8)
    address, size, time_us, stack = (
        np.frombuffer(column, np.int64) for column in (trace.address, trace.size_bytes, trace.time_us, trace.stack)
    )
    # A block counts as allocated until it is given back; only where that is not noted, until it is free.
    has_requests = bool((action == _FREE_REQUESTED).any())
    freeing = _FREE_REQUESTED if has_requests else _FREE_COMPLETED
    events = np.flatnonzero((action == _ALLOC) | (action == freeing))
    blocks, holes = _blocks(snapshot, device, events, action[events] == _ALLOC, address, size, stack, trace.count)
    pending = np.zeros(trace.count, np.int64)
    if has_requests:
        pending += np.where(action == _FREE_REQUESTED, size, 0) - np.where(action == _FREE_COMPLETED, size, 0)
    return Replay(
        device, time_us, blocks, held_bytes(blocks, blocks.size_bytes, trace.count),
        held_bytes(blocks, blocks.requested_bytes, trace.count), _reserved(snapshot, device, action, size),
        np.maximum(np.cumsum(pending), 0), holes,
    )  # fmt: skip


def held_bytes(blocks: Blocks, sizes: Integers, count: int) -> Integers:
    """Sum of the sizes (one for each block) of what is held right after each of so many entries."""
    change = np.zeros(count, np.int64)
    begun, ended = blocks.start != BEFORE, blocks.end < count
    np.add.at(change, blocks.start[begun], sizes[begun])
    np.subtract.at(change, blocks.end[ended], sizes[ended])
    return np.asarray(int(sizes[~begun].sum()) + np.cumsum(change))


def _reserved(snapshot: Snapshot, device: int, action: npt.NDArray[np.uint8], size: Integers) -> Integers:
    grown = np.cumsum(np.where(np.isin(action, _GROWS), size, 0) - np.where(np.isin(action, _SHRINKS), size, 0))
    segments = snapshot.segments
    at_end = sum(total for own, total in zip(segments.device, segments.total_bytes, strict=True) if own == device)
    return at_end - int(grown[-1]) + grown


def _blocks(
    snapshot: Snapshot,
    device: int,
    events: Integers,
    is_alloc: Flags,
    address: Integers,
    size: Integers,
    stack: Integers,
    count: int,
) -> tuple[Blocks, int]:
    """Every block, and how many events are missing."""
    order = np.lexsort((events, address[events]))
    events, is_alloc = events[order], is_alloc[order]
    at = address[events]
    follows = np.zeros(len(events), bool)
    follows[1:] = at[1:] == at[:-1]
    before_alloc = np.zeros(len(events), bool)
    before_alloc[1:] = is_alloc[:-1]
    # Freed, and never seen before: older than the history. Freed twice, or allocated twice: something is missing.
    older = ~is_alloc & ~follows
    holes = int((~is_alloc & follows & ~before_alloc).sum() + (is_alloc & follows & before_alloc).sum())
    allocs = np.flatnonzero(is_alloc)
    has_next = np.zeros(len(events), bool)
    has_next[:-1] = follows[1:]
    after = np.minimum(allocs + 1, max(len(events) - 1, 0))
    end = np.where(has_next[allocs], events[after], count) if len(allocs) else np.empty(0, np.int64)
    freed = has_next[allocs] & ~is_alloc[after] if len(allocs) else np.empty(0, bool)
    free_stack = np.where(freed, stack[events[after]], NO_STACK) if len(allocs) else np.empty(0, np.int64)

    held = _Held(snapshot, device)
    is_last = np.ones(len(events), bool)
    is_last[:-1] = ~follows[1:]
    last_alloc = np.zeros(len(events), bool)
    last_alloc[is_last & is_alloc] = True
    at_end = at[last_alloc]
    known = np.isin(held.address, at_end)
    # Allocated last, and not held at the end: its freeing is missing. Held at the end, freed last: its allocation is.
    holes += int((~np.isin(at_end, held.address)).sum())
    holes += int(np.isin(held.address, at[is_last & ~is_alloc]).sum())

    own_size = -(-size[events[allocs]] // ROUNDING) * ROUNDING
    own_size = np.where(end == count, held.sizes(at[allocs], own_size), own_size)
    old_size = size[events[older]]
    still = ~known
    return Blocks(
        address=np.concatenate([at[allocs], at[older], held.address[still]]),
        size_bytes=np.concatenate([own_size, -(-old_size // ROUNDING) * ROUNDING, held.size_bytes[still]]),
        requested_bytes=np.concatenate([size[events[allocs]], old_size, held.requested_bytes[still]]),
        start=np.concatenate([events[allocs], np.full(int(older.sum()) + int(still.sum()), BEFORE)]),
        end=np.concatenate([end, events[older], np.full(int(still.sum()), count)]),
        stack=np.concatenate([stack[events[allocs]], np.full(int(older.sum()), NO_STACK), held.stack[still]]),
        free_stack=np.concatenate([free_stack, stack[events[older]], np.full(int(still.sum()), NO_STACK)]),
    ), holes


class _Held:
    """Blocks that a device held when the snapshot was taken, by address."""

    def __init__(self, snapshot: Snapshot, device: int) -> None:
        segments = snapshot.segments
        segment, address, size, requested, state, stack = (
            np.frombuffer(column, np.int64)
            for column in (
                segments.block_segment, segments.block_address, segments.block_bytes, segments.block_requested_bytes,
                segments.block_state, segments.block_stack,
            )
        )  # fmt: skip
        of_device = np.array(segments.device, np.int64)[segment] == device if len(segment) else np.empty(0, bool)
        kept = np.flatnonzero(of_device & (state == 1))
        kept = kept[np.argsort(address[kept], kind="stable")]
        self.address, self.size_bytes = address[kept], size[kept]
        self.requested_bytes, self.stack = requested[kept], stack[kept]

    def sizes(self, at: Integers, otherwise: Integers) -> Integers:
        """The size of the block at each address, as the allocator took it."""
        if not len(self.address):
            return otherwise
        place = np.minimum(np.searchsorted(self.address, at), len(self.address) - 1)
        return np.where(self.address[place] == at, self.size_bytes[place], otherwise)


@dataclass(frozen=True)
class Free:
    """What was reserved and in no block when the snapshot was taken, and the largest piece of it."""

    total_bytes: int
    largest_bytes: int


def free_at_end(snapshot: Snapshot, device: int) -> Free:
    """The allocator's free pieces of a device at the end of the history."""
    segments = snapshot.segments
    segment, size, state = (
        np.frombuffer(column, np.int64)
        for column in (segments.block_segment, segments.block_bytes, segments.block_state)
    )
    own = np.array(segments.device, np.int64)[segment] == device if len(segment) else np.empty(0, bool)
    pieces = size[own & (state == 0)]
    return Free(int(pieces.sum()), int(pieces.max(initial=0)))
