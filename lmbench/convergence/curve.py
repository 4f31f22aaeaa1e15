"""How a run trained: loss and gradient norm of every step, from its folder."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from lmbench.files import Unreadable
from lmbench.records.load import read_steps
from lmbench.records.store import STEPS_FILE
from lmbench.report.gather import Sample

#: Steps of a run that are looked at; a file of them is a tenth of a gigabyte.
MAX_STEPS = 100_000
#: A figure beyond this has run away as much as an infinite one, and sums of it stay finite.
_MOST = 1e100
#: The tail, over which losses and norms are averaged: this share of the steps, the last ones.
TAIL_FRACTION = 0.25
#: What a smoothed loss is the mean of: this share of the steps, those up to the step itself.
SMOOTHED_FRACTION = 0.1


@dataclass(frozen=True)
class Curve:
    """Loss and gradient norm by step, from the first of the warm-up on; nan where a step has none.

    `skipped` are the steps without an update, by their places.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    skipped: frozenset[int]

    def __len__(self) -> int:
        return len(self.losses)

    def first(self, count: int) -> Curve:
        """Its first steps."""
        return Curve(self.losses[:count], self.norms[:count], self.skipped)

    @property
    def broke_at(self) -> int | None:
        """The first step whose loss is not finite though the scaler did not skip it; None where none is so."""
        places = (i for i, loss in enumerate(self.losses) if not math.isfinite(loss) and i not in self.skipped)
        return next(places, None)

    @property
    def tail_loss(self) -> float:
        """Mean loss of the tail's updates; nan if one of its losses is, or nothing was updated."""
        places = self._tail()
        return statistics.fmean(self.losses[i] for i in places) if places else math.nan

    @property
    def tail_log_norm(self) -> float | None:
        """Mean logarithm of the gradient norm of the tail's updates; None without norms, minus infinite where there was
        no gradient."""
        norms = [self.norms[i] for i in self._tail() if not math.isnan(self.norms[i])]
        if not norms:
            return None
        return statistics.fmean(map(math.log, norms)) if min(norms) > 0 else -math.inf

    def _tail(self) -> list[int]:
        start = len(self) - share(len(self), TAIL_FRACTION)
        return [i for i in range(start, len(self)) if i not in self.skipped]


def share(count: int, fraction: float) -> int:
    """So many of the steps, one at least."""
    return max(1, round(count * fraction))


def smoothed(values: Sequence[float], width: int, skipped: frozenset[int] = frozenset()) -> list[float]:
    """The mean of each value and those before it, `width` in all, without what was skipped; nan before there are as
    many, and where one of them is not finite."""
    sums, used, bad = [0.0], [0], [0]
    for place, value in enumerate(values):
        counts, is_finite = place not in skipped, math.isfinite(value)
        sums.append(sums[-1] + (value if counts and is_finite else 0.0))
        used.append(used[-1] + counts)
        bad.append(bad[-1] + (counts and not is_finite))
    found = [math.nan] * min(width - 1, len(values))
    for end in range(width, len(values) + 1):
        start = end - width
        is_known = used[end] > used[start] and bad[end] == bad[start]
        found.append((sums[end] - sums[start]) / (used[end] - used[start]) if is_known else math.nan)
    return found


def crossing(values: Sequence[float], level: float) -> float | None:
    """Where the values first come down to the level, between two steps by a straight line; None if they never do."""
    for place, value in enumerate(values):
        if value <= level:
            before = values[place - 1] if place else math.nan
            return place - (level - value) / (before - value) if before > level else float(place)
    return None


def curve_of(sample: Sample) -> Curve | None:
    """A run's curve, read from its folder; None where it has no step with a loss."""
    path = sample.path / STEPS_FILE
    try:
        state = path.stat()
    except OSError:
        return None
    found = _read(path, state.st_mtime_ns, state.st_size)
    return found if any(not math.isnan(loss) or found.broke_at is not None for loss in found.losses) else None


@lru_cache(maxsize=512)
def _read(path: Path, _changed_ns: int, _size_bytes: int) -> Curve:
    losses: list[float] = []
    norms: list[float] = []
    skipped: set[int] = set()
    try:
        for _, step in islice(read_steps(path), MAX_STEPS):
            if step is None:
                break
            if step.is_skipped:
                skipped.add(len(losses))
            losses.append(_figure(step.loss))
            norms.append(_figure(step.gradient_norm))
    except Unreadable:
        # What a torn file still tells is before that.
        pass
    return Curve(tuple(losses), tuple(norms), frozenset(skipped))


def _figure(value: float | None) -> float:
    if value is None:
        return math.nan
    return value if abs(value) < _MOST or math.isnan(value) else math.copysign(math.inf, value)
