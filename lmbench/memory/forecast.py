"""What a configuration will take, by phase and category; whether it fits; and the largest that does. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

from msgspec import Struct

from lmbench.memory.categories import CATEGORIES, Category
from lmbench.records.vocabulary import PHASES, Phase

#: What a process takes of a GPU before its first tensor: context, kernels, libraries. About this much on an H200
#: (estimate; nvidia-smi shows 500 to 620 MiB for a process of PyTorch 2 that did one matrix product).
CONTEXT_BYTES = 600 * 2**20
#: What the allocator holds beyond the peak, where blocks were left out, so that this cannot be replayed: 2.4 % in the
#: README's run of the large model, compiled, on an H200.
FRAGMENTATION_FRACTION = 0.025
#: Of the datasheet's size, what CUDA offers: 97.9 % to 99.2 % of it are known (RTX 4090 23.5 of 24, H200 139.8 of 141).
OFFERED_FRACTION = 0.985
#: Contexts are tried in multiples of this.
CONTEXT_UNIT = 64
#: A prediction from few blocks counts where it meets a third point, or the whole, as near as this.
ALIKE_FRACTION = 0.01
#: The same of phases that are not the highest.
ROUGHLY_FRACTION = 0.05
_MOST_BATCHES = 2**16
_MOST_CONTEXT = 2**22
_MOST_ROUNDS = 3
#: As many times the largest value that fits is tried next at most, where none is known that does not.
_FIRST_STEP = 4
#: After so many points of a search what is left is halved.
_HALVING = range(6, 100)
#: A curve that told a peak beforehand as near as this is believed about the next value.
TOLD_FRACTION = 1e-3


class CategoryBytes(Struct):
    """Bytes by category."""

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    logits: int = 0
    inputs: int = 0
    temporaries: int = 0
    workspaces: int = 0
    unknown: int = 0

    def get(self, category: Category) -> int:
        found: int = getattr(self, category)
        return found

    @property
    def total_bytes(self) -> int:
        return sum(self.get(category) for category in CATEGORIES)

    def mixed(self, other: CategoryBytes, weight: float) -> CategoryBytes:
        """Where the line through both goes: 0 is this one, 1 the other."""
        return CategoryBytes(**{c: round(self.get(c) + (other.get(c) - self.get(c)) * weight) for c in CATEGORIES})


class PhasePeak(Struct):
    """The most allocated at once in a phase, as the allocator counts it, and the operator that reaches it. `region` is
    empty, or the part of the backward that has the logits (`first`) or has not (`rest`)."""

    phase: Phase
    peak: CategoryBytes
    operator: str
    region: str = ""


class Gpu(Struct):
    """The GPU that it shall fit on; `is_here` says that its size was read from it, and not from a datasheet."""

    name: str
    total_bytes: int
    workspace_bytes: int
    is_here: bool

    def fits(self, reserved_bytes: int) -> bool:
        """Whether the allocator can hold so much beside the process's own part."""
        return reserved_bytes + CONTEXT_BYTES <= self.total_bytes


class Largest(Struct):
    """The largest value that fits and what the allocator holds then. `value` is null where nothing fits; `has_more`
    where even the largest that was tried does."""

    value: int | None
    reserved_bytes: int | None = None
    has_more: bool = False


class Forecast(Struct):
    """What `lmbench memory` tells of a configuration. Without a GPU named or here, nothing is said of fitting."""

    batch_size: int
    context_length: int | None
    precision: str
    mode: str
    zero_grad: str
    is_compiled: bool
    phases: list[PhasePeak]
    reserved_bytes: int
    method: str
    gpu: Gpu | None = None
    fits: bool | None = None
    largest_batch_size: Largest | None = None
    largest_context_length: Largest | None = None
    took_s: float = 0.0
    notes: list[str] = []

    @property
    def highest(self) -> PhasePeak:
        return max(self.phases, key=lambda each: each.peak.total_bytes)


@dataclass(frozen=True)
class Trial:
    """The peaks of one fake step, what the allocator held in the end, and how many alike blocks the whole module has
    (None: no such)."""

    peaks: list[PhasePeak]
    reserved_bytes: int
    block_count: int | None


#: A batch size and a context for a value that is searched.
At = Callable[[int], tuple[int, int | None]]
#: `largest_batch` or `largest_context`.
Search = Callable[[Callable[[int], int], "Gpu", int, Collection[int]], "Largest"]
#: Fake steps of a batch size and a context, with so many of the alike blocks (None: all of them).
TakeStep = Callable[[int, int | None, int | None], Trial]


class Predictor:
    """Peaks of any batch and context, from few blocks where that is as good as from all.

    Args:
        take_step: one fake step.
        batch_size, context_length: the configuration that is asked for; `phases` are its peaks.
        is_slow: a whole step takes long (it is compiled), so three points on a line have to do for a proof.

    `method` says what `phases` come from; `reserved_bytes` is what the allocator holds for them.
    """

    def __init__(self, take_step: TakeStep, batch_size: int, context_length: int | None, is_slow: bool) -> None:
        # A search comes by the same place more than once.
        self._take_step = cache(take_step)
        self.batch_size, self.context_length = batch_size, context_length
        self._is_slow = is_slow
        self._block_count: int | None = None
        self.method = "every block"
        #: Reserved bytes for each that is allocated at the peak.
        self._held_ratio = 1 + FRAGMENTATION_FRACTION
        self.phases = self._first_from_few() if is_slow else self._first_from_all()
        self.reserved_bytes = round(peak_bytes(self.phases) * self._held_ratio)

    def largest_batch(self, gpu: Gpu) -> Largest:
        """The largest batch size that fits."""
        return self._largest(lambda size: (size, self.context_length), largest_batch, self.batch_size, gpu)

    def largest_context(self, gpu: Gpu) -> Largest:
        """The largest context that fits."""
        assert self.context_length is not None
        return self._largest(lambda length: (self.batch_size, length), largest_context, self.context_length, gpu)

    def _largest(self, at: At, search: Search, start: int, gpu: Gpu) -> Largest:
        """Search by peaks from few blocks; then see what the allocator holds with all of them, and go by that."""
        known: dict[int, int] = {}
        held_ratio = self._held_ratio

        def reserve(value: int) -> int:
            if value not in known:
                known[value] = peak_bytes(self.peaks(*at(value)))
            return round(known[value] * held_ratio)

        found = search(reserve, gpu, start, ())
        for _ in range(_MOST_ROUNDS):
            if self._is_slow or found.value is None:
                break
            # Peaks stay those from few blocks, so that they stay on one curve.
            held_ratio = self._take_step(*at(found.value), None).reserved_bytes / known[found.value]
            again = search(reserve, gpu, found.value, tuple(known))
            if again.value == found.value:
                return again
            found = again
        return found

    def _whole(self, batch_size: int, context_length: int | None) -> Trial:
        trial = self._take_step(batch_size, context_length, None)
        self._held_ratio = trial.reserved_bytes / peak_bytes(trial.peaks)
        return trial

    def peaks(self, batch_size: int, context_length: int | None) -> list[PhasePeak]:
        """The peak of each phase of a configuration."""
        if self._block_count is not None:
            found = _on_line(self._points(batch_size, context_length), self._block_count)
            if found is not None:
                return found
        return by_phase(self._take_step(batch_size, context_length, None).peaks)

    def _first_from_all(self) -> list[PhasePeak]:
        """What is asked for, as it is; finds out whether few blocks would have done."""
        whole = self._whole(self.batch_size, self.context_length)
        found = by_phase(whole.peaks)
        if whole.block_count is not None:
            told = _on_line(self._points(self.batch_size, self.context_length), whole.block_count)
            if told is not None and _are_alike(told, found):
                self._block_count = whole.block_count
        return found

    def _first_from_few(self) -> list[PhasePeak]:
        three = self._take_step(self.batch_size, self.context_length, 3)
        if three.block_count is None:
            return by_phase(three.peaks)
        points = self._points(self.batch_size, self.context_length)
        told, found = _on_line(points, 3), _on_line(points, three.block_count)
        if told is None or found is None or not _are_alike(told, by_phase(three.peaks)):
            return self.peaks(self.batch_size, self.context_length)
        self._block_count = three.block_count
        self.method = f"2 and 4 of {three.block_count} alike blocks, checked by 3"
        return found

    def _points(self, batch_size: int, context_length: int | None) -> tuple[list[PhasePeak], list[PhasePeak]]:
        two, four = (self._take_step(batch_size, context_length, kept).peaks for kept in (2, 4))
        return two, four


def _on_line(points: tuple[list[PhasePeak], list[PhasePeak]], count: int) -> list[PhasePeak] | None:
    """What `count` blocks take, from what 2 and 4 do; None where these differ in more than figures."""
    two, four = points
    if [(one.phase, one.region) for one in two] != [(one.phase, one.region) for one in four]:
        return None
    weight = (count - 2) / 2
    pairs = zip(two, four, strict=True)
    return by_phase([PhasePeak(b.phase, a.peak.mixed(b.peak, weight), b.operator, b.region) for a, b in pairs])


def by_phase(peaks: list[PhasePeak]) -> list[PhasePeak]:
    """One peak for each phase, in their order: the highest of its regions."""
    found: dict[Phase, PhasePeak] = {}
    for one in peaks:
        if one.phase not in found or found[one.phase].peak.total_bytes < one.peak.total_bytes:
            found[one.phase] = one
    return [found[phase] for phase in PHASES if phase in found]


def peak_bytes(peaks: list[PhasePeak]) -> int:
    """The highest of all."""
    return max(one.peak.total_bytes for one in peaks)


def _are_alike(left: list[PhasePeak], right: list[PhasePeak]) -> bool:
    """Whether the highest peaks agree, and roughly all: how the allocator rounds is no line."""
    if [one.phase for one in left] != [one.phase for one in right]:
        return False
    pairs = [(a.peak.total_bytes, max(b.peak.total_bytes, 1)) for a, b in zip(left, right, strict=True)]
    highest = abs(peak_bytes(left) / peak_bytes(right) - 1) <= ALIKE_FRACTION
    return highest and all(abs(a / b - 1) <= ROUGHLY_FRACTION for a, b in pairs)


def largest_batch(reserve: Callable[[int], int], gpu: Gpu, start: int, seen: Collection[int] = ()) -> Largest:
    """The largest batch size that fits, by what is reserved for each.

    Begins at `start`, or with the sizes that were `seen` already, for which `reserve` takes no time.
    """
    return _largest(reserve, gpu, start, seen, 1, _MOST_BATCHES)


def largest_context(reserve: Callable[[int], int], gpu: Gpu, start: int, seen: Collection[int] = ()) -> Largest:
    """The largest context that fits, a multiple of `CONTEXT_UNIT` tokens."""
    return _largest(reserve, gpu, start, seen, CONTEXT_UNIT, _MOST_CONTEXT)


def _largest(
    reserve: Callable[[int], int], gpu: Gpu, start: int, seen: Collection[int], unit: int, most: int
) -> Largest:
    """Guess the border by the curve through what is known, predict there, and narrow it from both sides.

    A batch's figures lie on a line, a context's on a parabola; where the curve told a value's beforehand, it is
    believed about the next value too.
    """
    top = most // unit
    known = {value // unit: reserve(value) for value in seen}
    low = max((value for value in known if gpu.fits(known[value])), default=0)
    high = min((value for value in known if value > low), default=top + 1)
    guesses = 0
    while high - low > 1 and not _is_border(known, low, gpu):
        if not known:
            guess = max(1, min(start // unit, top))
        elif len(known) == 1 or guesses in _HALVING:
            # Of one point there is no curve; and one that was wrong as often is not asked again.
            guess = top if high > top else (low + high) // 2
        else:
            guess = _by_curve(_Curve(known, low or high), low, high, gpu)
        if high > top and low:
            # How the allocator rounds bends the curve a little, and far off that is much.
            guess = min(guess, _FIRST_STEP * low)
        known[guess] = reserve(guess * unit)
        guesses += 1
        if gpu.fits(known[guess]):
            low = guess
        else:
            high = guess
    if low == 0:
        return Largest(None)
    return Largest(low * unit, known[low], has_more=low == top)


def _is_border(known: dict[int, int], low: int, gpu: Gpu) -> bool:
    """Whether a curve that would have told what is known of `low` says that the next value does not fit."""
    others = {value: reserved for value, reserved in known.items() if value != low}
    if low == 0 or len(others) < 2:
        return False
    is_told = abs(_Curve(others, low)(low) / known[low] - 1) <= TOLD_FRACTION
    return is_told and not gpu.fits(round(_Curve(known, low)(low + 1)))


def _by_curve(curve: _Curve, low: int, high: int, gpu: Gpu) -> int:
    """The largest value between both that fits by the curve, or the nearest to that."""
    inside, outside = low, high
    while outside - inside > 1:
        middle = (inside + outside) // 2
        if gpu.fits(round(curve(middle))):
            inside = middle
        else:
            outside = middle
    return max(low + 1, inside)


class _Curve:
    """The parabola (of two points the line) through the known points nearest to a place."""

    def __init__(self, known: dict[int, int], place: int) -> None:
        self._points = [(value, known[value]) for value in sorted(known, key=lambda value: abs(value - place))[:3]]

    def __call__(self, value: int) -> float:
        total = 0.0
        for at, peak in self._points:
            share = 1.0
            for other, _ in self._points:
                if other != at:
                    share *= (value - other) / (at - other)
            total += peak * share
        return total
