"""What a configuration will take, by phase and category; whether it fits; and the largest that does. Without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct

from lmbench.memory.categories import CATEGORIES, Category
from lmbench.records.vocabulary import PHASES, Phase

#: What a process takes of a GPU before its first tensor: context, kernels, libraries. About this much on an H200
#: (estimate; nvidia-smi shows 500 to 620 MiB for a process of PyTorch 2 that did one matrix product).
CONTEXT_BYTES = 600 * 2**20
#: What the caching allocator holds beyond what is allocated: 2.4 % in the README's run of the large model on an H200.
FRAGMENTATION_FRACTION = 0.025
#: Of the datasheet's size, what CUDA offers: 97.9 % to 99.2 % of it are known (RTX 4090 23.5 of 24, H200 139.8 of 141).
OFFERED_FRACTION = 0.985
#: Forward and backward multiply in threads of their own, and each has a workspace.
WORKSPACES = 2
#: Contexts are tried in multiples of this.
CONTEXT_UNIT = 64
#: A prediction from few blocks counts where it meets a third point, or the whole, as near as this.
ALIKE_FRACTION = 1e-3
_MOST_BATCHES = 2**16
_MOST_CONTEXT = 2**22
#: A curve that told a peak beforehand as near as this is believed about the next value.
TOLD_FRACTION = 1e-4


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
    """The most allocated at once in a phase, and the operator that reaches it. `region` is empty, or the part of the
    backward that has the logits (`first`) or has not (`rest`)."""

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

    def fits(self, peak_bytes: int) -> bool:
        return peak_bytes * (1 + FRAGMENTATION_FRACTION) + CONTEXT_BYTES <= self.total_bytes


class Largest(Struct):
    """The largest value that fits and its peak. `value` is null where nothing fits; `has_more` where even the largest
    that was tried does."""

    value: int | None
    peak_bytes: int | None = None
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
    """The peaks of one fake step, and how many alike blocks the whole module has (None: no such)."""

    peaks: list[PhasePeak]
    block_count: int | None


#: Fake steps of a batch size and a context, with so many of the alike blocks (None: all of them).
TakeStep = Callable[[int, int | None, int | None], Trial]


class Predictor:
    """Peaks of any batch and context, from few blocks where that is as good as from all.

    Args:
        take_step: one fake step.
        is_slow: a whole step takes long (it is compiled), so three points on a line have to do for a proof.
    """

    def __init__(self, take_step: TakeStep, is_slow: bool) -> None:
        self._take_step = take_step
        self._is_slow = is_slow
        self._block_count: int | None = None
        self.method = "every block"

    def first(self, batch_size: int, context_length: int | None) -> list[PhasePeak]:
        """The configuration asked for; finds out whether few blocks will do for others."""
        if not self._is_slow:
            whole = self._take_step(batch_size, context_length, None)
            if whole.block_count is None:
                return by_phase(whole.peaks)
            found = self._extrapolated(batch_size, context_length, whole.block_count)
            if found is not None and _are_alike(found, by_phase(whole.peaks)):
                self._block_count = whole.block_count
            return by_phase(whole.peaks)
        third = self._take_step(batch_size, context_length, 3)
        if third.block_count is not None:
            found = self._extrapolated(batch_size, context_length, 3)
            if found is not None and _are_alike(found, by_phase(third.peaks)):
                self._block_count = third.block_count
                self.method = f"2 and 4 of {third.block_count} alike blocks, checked by 3"
                return self(batch_size, context_length)
        return by_phase(self._take_step(batch_size, context_length, None).peaks)

    def __call__(self, batch_size: int, context_length: int | None) -> list[PhasePeak]:
        if self._block_count is not None:
            found = self._extrapolated(batch_size, context_length, self._block_count)
            if found is not None:
                return found
        return by_phase(self._take_step(batch_size, context_length, None).peaks)

    def _extrapolated(self, batch_size: int, context_length: int | None, count: int) -> list[PhasePeak] | None:
        two, four = (self._take_step(batch_size, context_length, kept).peaks for kept in (2, 4))
        if [(p.phase, p.region) for p in two] != [(p.phase, p.region) for p in four]:
            return None
        weight = (count - 2) / 2
        lines = [
            PhasePeak(b.phase, a.peak.mixed(b.peak, weight), b.operator, b.region)
            for a, b in zip(two, four, strict=True)
        ]
        return by_phase(lines)


def by_phase(peaks: list[PhasePeak]) -> list[PhasePeak]:
    """One peak for each phase, in their order: the highest of its regions."""
    found: dict[Phase, PhasePeak] = {}
    for one in peaks:
        if one.phase not in found or found[one.phase].peak.total_bytes < one.peak.total_bytes:
            found[one.phase] = one
    return [found[phase] for phase in PHASES if phase in found]


def peak_bytes(peaks: list[PhasePeak]) -> int:
    return max(one.peak.total_bytes for one in peaks)


def _are_alike(left: list[PhasePeak], right: list[PhasePeak]) -> bool:
    if [one.phase for one in left] != [one.phase for one in right]:
        return False
    pairs = zip(left, right, strict=True)
    return all(abs(a.peak.total_bytes / max(b.peak.total_bytes, 1) - 1) <= ALIKE_FRACTION for a, b in pairs)


def largest_batch(predict: Callable[[int], int], gpu: Gpu, start: int, peak_at_start: int | None = None) -> Largest:
    """The largest batch size that fits, by the peak of each."""
    return _largest(predict, gpu, start, 1, _MOST_BATCHES, peak_at_start)


def largest_context(predict: Callable[[int], int], gpu: Gpu, start: int, peak_at_start: int | None = None) -> Largest:
    """The largest context that fits, a multiple of `CONTEXT_UNIT` tokens (or 1 token where less fits)."""
    return _largest(predict, gpu, start, CONTEXT_UNIT, _MOST_CONTEXT, peak_at_start)


def _largest(
    predict: Callable[[int], int], gpu: Gpu, start: int, unit: int, most: int, peak_at_start: int | None
) -> Largest:
    """Guess the border by the curve through what is known, predict there, and narrow it from both sides.

    A batch's peaks lie on a line, a context's on a parabola; where the curve told a guess's peak beforehand, it is
    believed about the next value too.
    """
    known: dict[int, int] = {} if peak_at_start is None or start % unit else {start // unit: peak_at_start}
    low, high, guess = 0, most // unit + 1, max(1, min(start // unit, most // unit))
    while high - low > 1:
        curve = _Curve(known, guess)
        told = curve(guess) if len(known) > 1 else 0.0
        if guess not in known:
            known[guess] = predict(guess * unit)
        if not gpu.fits(known[guess]):
            high = guess
        else:
            low = guess
            is_told = abs(told / known[guess] - 1) <= TOLD_FRACTION
            if is_told and low + 1 < high and not gpu.fits(round(curve(low + 1))):
                break
        guess = _next_guess(known, low, high, gpu)
    if low == 0:
        return Largest(None)
    return Largest(low * unit, known[low], has_more=low == most // unit)


def _next_guess(known: dict[int, int], low: int, high: int, gpu: Gpu) -> int:
    if len(known) == 1:
        return min(2 * low, high - 1) if low else max(1, high // 2)
    curve = _Curve(known, low or high)
    inside, outside = low, high
    while outside - inside > 1:
        middle = (inside + outside) // 2
        if gpu.fits(round(curve(middle))):
            inside = middle
        else:
            outside = middle
    return max(low + 1, min(inside, high - 1))


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
