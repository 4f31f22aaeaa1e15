"""PyTorch's caching allocator, as far as sizes go, and the peaks of a log of allocations. Works without torch.

The rules are those of c10/core/CachingDeviceAllocator.h and c10/cuda/CUDACachingAllocator.cpp (torch 2.13, the default
settings, one stream). A run of the small model on an H200 (tests/data/runs/h200_run.json) allocated what this says to
0.001 % in forward and backward, and held 0.2 % less.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pandas as pd
from msgspec import Struct
from msgspec.structs import astuple

from lmbench.memory.blocks import CATEGORIES, Category, by_category, held_at, held_bytes, highest_moments, rounded_bytes
from lmbench.memory.forecast import PhasePeak
from lmbench.records.vocabulary import Phase

_MIB = 2**20
#: Requests up to this share segments of their own (kSmallSize), of this size (kSmallBuffer);
_SMALL_BYTES, _SMALL_SEGMENT_BYTES = _MIB, 2 * _MIB
#: larger ones below this (kMinLargeAlloc) segments of this size (kLargeBuffer);
_LARGE_FROM_BYTES, _LARGE_SEGMENT_BYTES = 10 * _MIB, 20 * _MIB
#: and each of the rest has one of a multiple of this (kRoundLarge).
_SEGMENT_MULTIPLE_BYTES = 2 * _MIB
#: A block is split where no less than this is left of it: of a small one, and of a larger one.
_LEAST_REST_BYTES = {True: 512, False: _MIB + 1}


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
        size = rounded_bytes(max(size_bytes, 1))
        is_small = size <= _SMALL_BYTES
        free = self._free[is_small]
        place = bisect_left(free, (size, 0))
        if place < len(free):
            block = free.pop(place)[2]
            block.is_free = False
        else:
            held = rounded_bytes(size, _SEGMENT_MULTIPLE_BYTES)
            if size < _LARGE_FROM_BYTES:
                held = _SMALL_SEGMENT_BYTES if is_small else _LARGE_SEGMENT_BYTES
            # Segments lie one behind the other.
            block = Block(self.reserved_bytes, held, is_small)
            self.reserved_bytes += held
        left = block.size_bytes - size
        if left >= _LEAST_REST_BYTES[is_small]:
            rest = Block(block.address + size, left, is_small, True, block, block.behind)
            if block.behind is not None:
                block.behind.before = rest
            block.behind, block.size_bytes = rest, size
            insort(free, (left, rest.address, rest))
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
                block, gone = (neighbour, block) if neighbour is block.before else (block, neighbour)
                block.size_bytes, block.behind = block.size_bytes + gone.size_bytes, gone.behind
                if gone.behind is not None:
                    gone.behind.before = block
        block.is_free = True
        insort(free, (block.size_bytes, block.address, block))


class Allocation(Struct):
    """One piece of memory, for so many elements. `start` and `end` are places in the order of all events; it lives from
    the one to just before the other, and to the end of the log where `end` is None."""

    size_bytes: int
    start: int
    category: Category | None
    made_by: str
    numel: int = 0
    end: int | None = None


class Stretch(NamedTuple):
    """A part of a step from one event to another: of a phase, and within it of a named region."""

    start: int
    end: int
    phase: Phase
    region: str


def peaks_of(allocations: Sequence[Allocation], stretches: Sequence[Stretch]) -> tuple[list[PhasePeak], int]:
    """The peak of each phase and region in its stretches, what is there at their begin included, as the caching
    allocator would have it; and what it has reserved in the end: it gives nothing back.

    Args:
        allocations: from the first of the process on, in order. Every one has its category by now.
        stretches: in order, without overlap.
    """
    count = stretches[-1].end + 1
    sized = [each for each in allocations if each.size_bytes and each.start < count]
    events = [(each.start, index) for index, each in enumerate(sized)]
    events += [(each.end, index) for index, each in enumerate(sized) if each.end is not None]
    allocator, held, sizes = CachingAllocator(), dict[int, Block](), list[int]()
    for _, index in sorted(events):
        if index in held:
            allocator.free(held.pop(index))
        else:
            held[index] = allocator.allocate(sized[index].size_bytes)
            sizes.append(held[index].size_bytes)
    blocks = pd.DataFrame(map(astuple, sized), columns=Allocation.__struct_fields__)
    blocks = blocks.assign(size_bytes=sizes, end=blocks["end"].fillna(count).clip(upper=count).astype(int))
    spans = [((stretch.phase, stretch.region), stretch.start, stretch.end) for stretch in stretches]
    peaks = []
    for (phase, region), moment in highest_moments(held_bytes(blocks, count), spans).items():
        there = held_at(blocks, moment)
        latest = "" if there.empty else there["made_by"].iloc[-1]
        peaks.append(PhasePeak(phase, {**dict.fromkeys(CATEGORIES, 0), **by_category(there)}, latest, region))
    return peaks, allocator.reserved_bytes
