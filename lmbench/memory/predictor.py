"""Peaks of any batch and context from fake steps, as PyTorch's caching allocator would have them, and the largest batch
and context that fit. Works without torch.

The allocator's rules are those of c10/core/CachingDeviceAllocator.h and c10/cuda/CUDACachingAllocator.cpp (torch 2.13,
the default settings, one stream). A run of the small model on an H200 (tests/data/runs/h200_run.json) allocated what
this says to 0.001 % in forward and backward, and held 0.2 % less.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from typing import NamedTuple

import pandas as pd
import scipy  # type: ignore[import-untyped]
from msgspec import Struct
from msgspec.structs import astuple, replace

from lmbench.memory.blocks import CATEGORIES, Category, by_category, held_at, held_bytes, highest_moments, rounded_bytes
from lmbench.memory.forecast import CONTEXT_BYTES, Gpu, Largest, PhasePeak
from lmbench.records.vocabulary import PHASES, Phase

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


#: What the allocator holds beyond the peak, where blocks were left out, so that this cannot be replayed: 2.4 % in the
#: README's run of the large model, compiled, on an H200.
FRAGMENTATION_FRACTION = 0.025
#: Contexts are tried in multiples of this.
CONTEXT_UNIT = 64
MAX_BATCH, MAX_CONTEXT = 2**16, 2**22
#: A prediction from few blocks counts where it meets a third point, or all blocks, as near as this;
ALIKE_FRACTION = 0.01
#: phases that are not the highest as near as this: how the allocator rounds is no line.
ROUGHLY_FRACTION = 0.05
#: What the region of a peak begins with in a step before the steady one: DDP's second may take more than later ones.
EARLIER = "before "
#: What ranks share between them, where they share anything.
SHARED: tuple[Category, ...] = ("parameters", "gradients", "optimizer_state")
#: Searches for a border, each with the reserved bytes for an allocated one of the border before.
_MAX_ROUNDS = 3


class Trial(NamedTuple):
    """The peaks of one fake step, what the allocator held in the end, and how many alike blocks the whole module has
    (None: no such)."""

    peaks: list[PhasePeak]
    reserved_bytes: int
    block_count: int | None


#: A fake step of a batch size and a context, with so many of the alike blocks (None: all of them).
TakeStep = Callable[[int, int | None, int | None], Trial]


class Predictor:
    """Peaks of any batch and context, from few blocks where that is as good as from all.

    Args:
        take_step: one fake step.
        batch_size, context_length: the configuration that is asked for; `phases` are its peaks.
        is_slow: a whole step takes long (it is compiled), so three points on a line have to do for a proof.

    `method` says what `phases` come from; `run_peak_bytes` is the most that is allocated from the first step on, and
    `reserved_bytes` what the allocator holds for it.
    """

    def __init__(self, take_step: TakeStep, batch_size: int, context_length: int | None, is_slow: bool) -> None:
        # A search comes by the same place more than once.
        self._take_step = cache(take_step)
        self.batch_size, self.context_length, self._is_slow = batch_size, context_length, is_slow
        #: How many alike blocks there are, where few of them tell what all take.
        self._block_count: int | None = None
        self.method = "every block"
        kept = 3 if is_slow else None
        trial = self._take_step(batch_size, context_length, kept)
        peaks, count = trial.peaks, trial.block_count
        #: Reserved bytes for each that is allocated at the peak.
        self._held_ratio = 1 + FRAGMENTATION_FRACTION if is_slow else trial.reserved_bytes / peak_bytes(peaks)
        if count is not None:
            # Two and four blocks have to tell what three take, or all of them.
            is_alike = _are_alike(self._from_few(batch_size, context_length, kept or count), peaks)
            self._block_count = count if is_alike else None
            if is_slow:
                peaks = self.peaks(batch_size, context_length)
                self.method = f"2 and 4 of {count} alike blocks, checked by 3" if is_alike else self.method
        self._peaks, self.phases, self.run_peak_bytes = peaks, by_phase(peaks), peak_bytes(peaks)
        self.reserved_bytes = round(self.run_peak_bytes * self._held_ratio)

    def largest(self, gpu: Gpu, is_context: bool = False) -> Largest:
        """The largest batch size that fits, or the largest context, a multiple of CONTEXT_UNIT tokens.

        Search by peaks from few blocks; then see what the allocator holds with all of them, and go by that.
        """
        start, unit, limit, ratio = self.batch_size, 1, MAX_BATCH, self._held_ratio
        if is_context:
            start, unit, limit = self.context_length or CONTEXT_UNIT, CONTEXT_UNIT, MAX_CONTEXT

        def shape(value: int) -> tuple[int, int | None]:
            return (self.batch_size, value) if is_context else (value, self.context_length)

        peak = cache(lambda value: peak_bytes(self.peaks(*shape(value))))

        def reserve(value: int) -> int:
            return round(peak(value) * ratio)

        for _ in range(_MAX_ROUNDS):
            border = largest_that_fits(reserve, gpu, start, unit, limit)
            if self._is_slow or border.value in (None, start):
                break
            # Peaks stay those from few blocks, so that they stay on one curve.
            start = border.value
            ratio = self._take_step(*shape(start), None).reserved_bytes / peak(start)
        return border

    def fewest_ranks(self, world_size: int, gpu: Gpu, reserve: Callable[[int], int]) -> int | None:
        """The smallest number of ranks that fits where they share parameters, gradients and optimizer state evenly.

        Each peak is `shared / ranks + rest`; None where the rest alone is too much.

        Args:
            world_size: of how many `self` has the peaks.
            reserve: the reserved bytes for a number of ranks, to see whether what follows from the peaks is true.
        """
        counts = []
        for peak in self._peaks:
            shared_bytes = sum(peak.peak[name] for name in SHARED) * self._held_ratio
            room_bytes = gpu.total_bytes - CONTEXT_BYTES - (peak.total_bytes * self._held_ratio - shared_bytes)
            if room_bytes <= 0:
                return None
            counts.append(ceil(shared_bytes * world_size / room_bytes))
        count = max(counts)
        while not gpu.fits(reserve(count)):
            count += 1
        return count

    def peaks(self, batch_size: int, context_length: int | None) -> list[PhasePeak]:
        """The peak of each phase and region of a configuration."""
        few = self._from_few(batch_size, context_length, self._block_count) if self._block_count else []
        return few or self._take_step(batch_size, context_length, None).peaks

    def _from_few(self, batch_size: int, context_length: int | None, count: int) -> list[PhasePeak]:
        """What `count` blocks take, on the line through what 2 and 4 do; nothing where these differ in more than
        figures."""
        two, four = (self._take_step(batch_size, context_length, kept).peaks for kept in (2, 4))
        if [(peak.phase, peak.region) for peak in two] != [(peak.phase, peak.region) for peak in four]:
            return []
        on_line = []
        for a, b in zip(two, four, strict=True):
            sizes = {name: round(a.peak[name] + (b.peak[name] - a.peak[name]) * (count - 2) / 2) for name in b.peak}
            on_line.append(replace(b, peak=sizes))
        return on_line


def by_phase(peaks: list[PhasePeak]) -> list[PhasePeak]:
    """One peak for each phase of the steady step, in their order: the highest of its regions."""
    steady = [peak for peak in peaks if not peak.region.startswith(EARLIER)]
    of_phase = {phase: [peak for peak in steady if peak.phase == phase] for phase in PHASES}
    return [max(same, key=lambda peak: peak.total_bytes) for same in of_phase.values() if same]


def peak_bytes(peaks: list[PhasePeak]) -> int:
    """The highest of all."""
    return max(peak.total_bytes for peak in peaks)


def _are_alike(left: list[PhasePeak], right: list[PhasePeak]) -> bool:
    """Whether the highest peaks agree, and roughly those of all phases."""
    if not left or abs(peak_bytes(left) - peak_bytes(right)) > ALIKE_FRACTION * peak_bytes(right):
        return False
    left, right = by_phase(left), by_phase(right)
    if [peak.phase for peak in left] != [peak.phase for peak in right]:
        return False
    sizes = [(few.total_bytes, several.total_bytes) for few, several in zip(left, right, strict=True)]
    return all(abs(few - several) <= ROUGHLY_FRACTION * several for few, several in sizes)


def largest_that_fits(reserve: Callable[[int], int], gpu: Gpu, start: int, unit: int, limit: int) -> Largest:
    """The largest multiple of `unit` up to `limit` that fits, by what is reserved for each; the search begins at
    `start`, and goes on by Brent's method between a value that fits and one that does not."""
    low, most, room = 1, limit // unit, gpu.total_bytes - CONTEXT_BYTES
    high = max(1, min(start // unit, most))

    @cache
    def room_bytes(count: int) -> int:
        return room - reserve(count * unit)

    while room_bytes(high) >= 0 and high < most:
        low, high = high, min(4 * high, most)
    count = high
    if room_bytes(high) < 0 <= room_bytes(low):
        count = round(scipy.optimize.brentq(lambda value: room_bytes(round(value)), low, high, xtol=0.5))
        while room_bytes(count) < 0:
            count -= 1
        while room_bytes(count + 1) >= 0:
            count += 1
    if room_bytes(count) < 0:
        return Largest(None)
    return Largest(count * unit, room - room_bytes(count))
