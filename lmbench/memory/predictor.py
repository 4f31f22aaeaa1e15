"""Memory peaks of any batch and context from fake steps, and the largest batch and context that fit. Works without
torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, cached_property
from math import ceil
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from lmbench.errors import UsageError
from lmbench.memory.blocks import Category
from lmbench.memory.chain import FewBlocks
from lmbench.memory.forecast import FitOnGpu, PhasePeak, TargetGpu
from lmbench.records.vocabulary import PHASES

#: The memory that the allocator reserves beyond the peak, as a share of it, where blocks were left out and it cannot be
#: replayed: 2.4 % in the README's run of the large model, compiled, on an H200.
FRAGMENTATION_FRACTION = 0.025
#: Contexts are tried in multiples of this.
CONTEXT_UNIT = 64
MAX_BATCH, MAX_CONTEXT = 2**24, 2**22
#: The largest error of the highest peak for which a prediction from few blocks is used.
ALIKE_FRACTION = 0.01
#: The largest error of the other phases' peaks, which is wider: rounding by the allocator is not linear in the blocks.
ROUGHLY_FRACTION = 0.05
#: The prefix of regions in a step before the steady one: DDP's second step may take more than later ones.
EARLIER = "before "
#: The categories that ranks share if they share any.
SHARED: tuple[Category, ...] = ("parameters", "gradients", "optimizer_state")


class FakeStep(NamedTuple):
    """The result of one fake step: its peaks, the bytes that the allocator reserved, and the number of alike blocks.

    `block_count` is that of the whole module, None for a module without alike blocks.
    """

    peaks: list[PhasePeak]
    reserved_bytes: int
    block_count: int | None


class Shape(NamedTuple):
    """A batch size and a context length, which is None for data that is not lmbench's own."""

    batch_size: int
    context_length: int | None


#: Takes a fake step of a shape with a number of the alike blocks (None: all of them).
TakeStep = Callable[[Shape, int | None], FakeStep]


class Predictor:
    """Predicts the peaks of any batch and context, from few blocks if that is as good as from all.

    `phases` are the peaks of the configuration asked for, and `method` says what they come from. `run_peak_bytes` is
    the peak from the first step on, and `reserved_bytes` the memory that the allocator holds for it.

    Args:
        take_step: takes one fake step.
        shape: the configuration asked for.
        is_slow: whether a whole step takes long, since the network is compiled as a whole. Then steps of 2, 3 and 4
            groups have to agree, instead of those of 2 and 4 groups and of all blocks.
        group: alike blocks that are sharded together; 1 where each is by itself.
    """

    def __init__(self, take_step: TakeStep, shape: Shape, is_slow: bool = False, group: int = 1) -> None:
        # A search tries the same values more than once.
        self._take_step = cache(take_step)
        self.shape, self._is_slow = shape, is_slow
        self._few = FewBlocks(2 * group, 4 * group)
        self._kept = 3 * group if is_slow else None
        self._trial = trial = self._take_step(shape, self._kept)
        self._peaks, self.method = trial.peaks, "every block"
        self.reserved_bytes = trial.reserved_bytes
        if is_slow:
            if trial.block_count is not None:
                self._peaks = self.peaks(shape)
            self.reserved_bytes = round(peak_bytes(self._peaks) * (1 + FRAGMENTATION_FRACTION))
            if self._block_count is not None:
                few = "{} and {}".format(*self._few)
                self.method = f"{few} of {self._block_count} alike blocks, checked by {self._kept}"
        self.phases = by_phase(self._peaks)
        self.run_peak_bytes = peak_bytes(self._peaks)

    @cached_property
    def _block_count(self) -> int | None:
        """The number of alike blocks, if steps of two and of four groups tell the peaks of the trial; else None."""
        trial = self._trial
        if trial.block_count is None:
            return None
        few = self._from_few(self.shape, self._kept or trial.block_count)
        return trial.block_count if _are_alike(few, trial.peaks) else None

    def fits_on(self, gpus: Sequence[TargetGpu], has_context: bool) -> list[FitOnGpu]:
        """Whether the configuration fits on each GPU, and the largest batch size and context length that do.

        Args:
            gpus: the GPUs. The peaks have the largest of their workspaces of cuBLAS, at most 50 MiB more than others.
            has_context: whether the context length can be varied; a multiple of CONTEXT_UNIT is found.
        """
        none: Sequence[int | None] = [None] * len(gpus)
        batches = contexts = none
        # No larger batch can be made of one that tells its lengths in a list.
        with suppress(UsageError):
            batches = self._largest(gpus, "batch_size", 1, MAX_BATCH)
        if has_context:
            contexts = self._largest(gpus, "context_length", CONTEXT_UNIT, MAX_CONTEXT)
        fits = [gpu.fits(self.reserved_bytes) for gpu in gpus]
        return [FitOnGpu(*row) for row in zip(gpus, fits, batches, contexts, strict=True)]

    def _largest(self, gpus: Sequence[TargetGpu], name: str, unit: int, limit: int) -> list[int | None]:
        """The largest value that fits on each GPU, a multiple of `unit` up to `limit`.

        The peak of each part of a step is a polynomial: of the first degree in the batch size, of the second in the
        context length, for attention that is not fused. It goes through the configuration's value and two larger ones.
        The bytes reserved beyond a peak lie between those of the first and of the last of these.

        Args:
            name: the field of the shape that is varied.
        """
        start: int = getattr(self.shape, name)

        def shape_of(value: int) -> Shape:
            return self.shape._replace(**{name: value})

        def through(values: list[int]) -> Callable[[int], float]:
            sizes = [[peak.total_bytes for peak in self.peaks(shape_of(value))] for value in values]
            polynomials = np.polyfit(values, sizes, len(values) - 1)
            return lambda value: float(np.polyval(polynomials, value).max())

        largest_bytes = max(gpu.room_bytes for gpu in gpus)
        far = largest_that_fits(through([start, 4 * start]), largest_bytes, start, unit, limit) or start
        far = max(far, 4 * start, 4 * unit)
        peak = through([start, max(2 * start, far // unit // 2 * unit), far])
        ends = [peak(value) for value in (start, far)]
        beyond = [self._bytes_beyond_peak(shape_of(value)) for value in (start, far)]

        def reserve(value: int) -> float:
            return peak(value) + float(np.interp(peak(value), ends, beyond))

        return [largest_that_fits(reserve, gpu.room_bytes, start, unit, limit) for gpu in gpus]

    def _bytes_beyond_peak(self, shape: Shape) -> float:
        """The bytes that are reserved beyond the peak, from a step of all blocks unless that is slow."""
        peak = peak_bytes(self.peaks(shape))
        return peak * FRAGMENTATION_FRACTION if self._is_slow else self._take_step(shape, None).reserved_bytes - peak

    def fewest_ranks(self, world_size: int, gpu: TargetGpu) -> int | None:
        """The smallest number of ranks that fits if they share parameters, gradients and optimizer state evenly.

        Each peak is `shared / ranks + rest`, where this predictor's peaks are for `world_size` ranks; None if the rest
        alone does not fit.
        """
        counts, reserved_ratio = [], self.reserved_bytes / self.run_peak_bytes
        for peak in self._peaks:
            shared_bytes = sum(peak.peak[name] for name in SHARED) * reserved_ratio
            room_bytes = gpu.room_bytes - (peak.total_bytes * reserved_ratio - shared_bytes)
            if room_bytes <= 0:
                return None
            counts.append(ceil(shared_bytes * world_size / room_bytes))
        return max(counts)

    def peaks(self, shape: Shape) -> list[PhasePeak]:
        """The peak of each phase and region of a configuration, from few blocks if they tell the peaks of all."""
        few = self._from_few(shape, self._block_count) if self._block_count else []
        return few or self._take_step(shape, None).peaks

    def _from_few(self, shape: Shape, count: int) -> list[PhasePeak]:
        """The peaks of `count` blocks, on the line through those of two and of four groups.

        Empty if steps of two and of four groups have different phases or regions.
        """
        two, four = (self._take_step(shape, kept).peaks for kept in self._few)
        if [(peak.phase, peak.region) for peak in two] != [(peak.phase, peak.region) for peak in four]:
            return []
        peaks = []
        for of_two, of_four in zip(two, four, strict=True):
            sizes = self._few.at(count, of_two.peak, of_four.peak)
            peaks.append(replace(of_four, peak={name: round(size) for name, size in sizes.items()}))
        return peaks


def by_phase(peaks: list[PhasePeak]) -> list[PhasePeak]:
    """The highest peak of each phase of the steady step, in the order of a step."""
    steady = [peak for peak in peaks if not peak.region.startswith(EARLIER)]
    regions = ([peak for peak in steady if peak.phase == phase] for phase in PHASES)
    return [max(of_phase, key=lambda peak: peak.total_bytes) for of_phase in regions if of_phase]


def peak_bytes(peaks: list[PhasePeak]) -> int:
    """The bytes of the highest peak."""
    return max(peak.total_bytes for peak in peaks)


def _are_alike(left: list[PhasePeak], right: list[PhasePeak]) -> bool:
    """Whether the highest peaks agree, and the peaks of all phases roughly."""
    if not left or abs(peak_bytes(left) - peak_bytes(right)) > ALIKE_FRACTION * peak_bytes(right):
        return False
    sizes, expected = ({peak.phase: peak.total_bytes for peak in by_phase(peaks)} for peaks in (left, right))
    return sizes.keys() == expected.keys() and all(
        abs(sizes[phase] - size) <= ROUGHLY_FRACTION * size for phase, size in expected.items()
    )


def largest_that_fits(
    reserve: Callable[[int], float], room_bytes: float, start: int, unit: int, limit: int
) -> int | None:
    """The largest multiple of `unit` up to `limit` whose reserved bytes are not more than the room; None if none is.

    The search widens from `start` in steps of four: a polynomial through three shapes is wrong far from them.
    """
    count, max_count = max(1, start // unit), limit // unit
    while count < max_count and reserve(count * unit) <= room_bytes:
        count *= 4
    counts = range(1, min(count, max_count) + 1)
    return bisect_right(counts, room_bytes, key=lambda count: reserve(count * unit)) * unit or None
