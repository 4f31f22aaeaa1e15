"""PyTorch's caching allocator, as far as sizes go, and the peaks of a log of allocations. Works without torch.

The rules are those of c10/core/CachingDeviceAllocator.h and c10/cuda/CUDACachingAllocator.cpp (torch 2.13, the default
settings, one stream). A run of the small model on an H200 (tests/data/runs/h200_run.json) allocated what this says to
0.001 % in forward and backward, and held 0.2 % less.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import NamedTuple

from lmbench.memory.recorded import Category

_MIB = 2**20
#: Requests are rounded up to a multiple of this (kMinBlockSize).
ROUNDED_TO_BYTES = 512
#: Requests up to this share segments of their own (kSmallSize), of this size (kSmallBuffer);
_SMALL_BYTES, _SMALL_SEGMENT_BYTES = _MIB, 2 * _MIB
#: larger ones below this (kMinLargeAlloc) segments of this size (kLargeBuffer);
_LARGE_FROM_BYTES, _LARGE_SEGMENT_BYTES = 10 * _MIB, 20 * _MIB
#: and each of the rest has one of a multiple of this (kRoundLarge).
_SEGMENT_MULTIPLE_BYTES = 2 * _MIB
#: A larger block is not split where no more than this would be left of it.
_LEFT_WHOLE_BYTES = _MIB


def rounded_bytes(size_bytes: int, to_bytes: int = ROUNDED_TO_BYTES) -> int:
    """The next multiple."""
    return -(-size_bytes // to_bytes) * to_bytes


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, with its neighbours in it."""

    address: int
    size_bytes: int
    is_small: bool
    is_free: bool = False
    before: Block | None = None
    behind: Block | None = None


@dataclass
class CachingAllocator:
    """Blocks are handed out and taken back; `allocated_bytes` is what is out, `reserved_bytes` what segments hold."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    _free: dict[bool, list[tuple[int, int, Block]]] = field(default_factory=lambda: {True: [], False: []})

    def allocate(self, size_bytes: int) -> Block:
        """A block for a request; its size may be more than was asked for."""
        size = max(rounded_bytes(size_bytes), ROUNDED_TO_BYTES)
        is_small = size <= _SMALL_BYTES
        free = self._free[is_small]
        place = bisect_left(free, (size, 0))
        if place < len(free):
            block = free.pop(place)[2]
        else:
            held = rounded_bytes(size, _SEGMENT_MULTIPLE_BYTES)
            if size < _LARGE_FROM_BYTES:
                held = _SMALL_SEGMENT_BYTES if is_small else _LARGE_SEGMENT_BYTES
            # Segments lie one behind the other.
            block = Block(self.reserved_bytes, held, is_small)
            self.reserved_bytes += held
        left = block.size_bytes - size
        if left >= ROUNDED_TO_BYTES if is_small else left > _LEFT_WHOLE_BYTES:
            rest = Block(block.address + size, left, is_small, True, block, block.behind)
            if block.behind is not None:
                block.behind.before = rest
            block.behind, block.size_bytes = rest, size
            insort(free, (left, rest.address, rest))
        block.is_free = False
        self.allocated_bytes += block.size_bytes
        return block

    def free(self, block: Block) -> None:
        """Take a block back and join it with free neighbours."""
        self.allocated_bytes -= block.size_bytes
        free = self._free[block.is_small]
        for neighbour in (block.before, block.behind):
            if neighbour is not None and neighbour.is_free:
                # No two blocks have an address in common, so blocks themselves are never compared.
                del free[bisect_left(free, (neighbour.size_bytes, neighbour.address))]
                block = neighbour if neighbour is block.before else block
                gone = block.behind
                assert gone is not None
                block.size_bytes, block.behind = block.size_bytes + gone.size_bytes, gone.behind
                if gone.behind is not None:
                    gone.behind.before = block
        block.is_free = True
        insort(free, (block.size_bytes, block.address, block))


@dataclass(slots=True)
class Allocation:
    """One piece of memory. `born` and `died` are places in the order of all events; it lives from the one to just
    before the other, and to the end of the log where `died` is None."""

    size_bytes: int
    born: int
    category: Category | None
    made_by: str
    died: int | None = None


class Stretch(NamedTuple):
    """A part of a step between two events: of a phase, and within it of a named region."""

    start: int
    end: int
    phase: str
    region: str


class Peak(NamedTuple):
    """The most that is allocated at once within a stretch, by category, and the operator that reached it.

    `reserved_bytes` is what the allocator holds at the stretch's end: it gives nothing back.
    """

    total_bytes: int
    bytes_by_category: dict[Category, int]
    made_by: str
    reserved_bytes: int


def peaks_of(allocations: Sequence[Allocation], stretches: Sequence[Stretch]) -> list[Peak]:
    """The peak of each stretch, what is there at its begin included, as the caching allocator would have it.

    Args:
        allocations: from the first of the process on, in any order. Every one has its category by now.
        stretches: in order, without overlap.
    """
    sized = [allocation for allocation in allocations if allocation.size_bytes]
    events = [(allocation.born, allocation) for allocation in sized]
    events += [(allocation.died, allocation) for allocation in sized if allocation.died is not None]
    # The next one is the last.
    events.sort(key=itemgetter(0), reverse=True)
    allocator, blocks, sizes = CachingAllocator(), dict[int, Block](), dict[int, int]()

    def play(until: int) -> Iterator[int]:
        """Let the events up to a place happen; yields the place of each."""
        while events and events[-1][0] <= until:
            place, allocation = events.pop()
            if id(allocation) in blocks:
                allocator.free(blocks.pop(id(allocation)))
            else:
                block = blocks[id(allocation)] = allocator.allocate(allocation.size_bytes)
                sizes[id(allocation)] = block.size_bytes
            yield place

    peaks: list[Peak] = []
    for stretch in stretches:
        list(play(stretch.start))
        most, moment = allocator.allocated_bytes, stretch.start
        for place in play(stretch.end):
            if allocator.allocated_bytes > most:
                most, moment = allocator.allocated_bytes, place
        held = [a for a in sized if a.born <= moment < (a.died or moment + 1)]
        by_category: dict[Category, int] = Counter()
        for allocation in held:
            by_category[allocation.category or "unknown"] += sizes[id(allocation)]
        latest = max(held, key=attrgetter("born"), default=None)
        peaks.append(Peak(most, by_category, latest.made_by if latest else "", allocator.reserved_bytes))
    return peaks
