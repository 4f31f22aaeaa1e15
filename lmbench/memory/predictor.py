"""Peaks of any batch and context from fake steps, and the largest batch and context that fit. Works without torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil
from typing import NamedTuple

import scipy  # type: ignore[import-untyped]
from msgspec.structs import replace

from lmbench.memory.blocks import Category
from lmbench.memory.forecast import CONTEXT_BYTES, Gpu, Largest, PhasePeak
from lmbench.records.vocabulary import PHASES

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

    def largest_batch(self, gpu: Gpu) -> Largest:
        """The largest batch size that fits."""
        return self._largest(lambda size: (size, self.context_length), self.batch_size, 1, MAX_BATCH, gpu)

    def largest_context(self, gpu: Gpu) -> Largest:
        """The largest context that fits, a multiple of CONTEXT_UNIT tokens."""
        start = self.context_length or CONTEXT_UNIT
        return self._largest(lambda length: (self.batch_size, length), start, CONTEXT_UNIT, MAX_CONTEXT, gpu)

    def _largest(
        self, shape: Callable[[int], tuple[int, int | None]], start: int, unit: int, limit: int, gpu: Gpu
    ) -> Largest:
        """Search by peaks from few blocks; then see what the allocator holds with all of them, and go by that."""
        ratio = self._held_ratio
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
    return Largest(count * unit, room - room_bytes(count), has_more=count == most)
