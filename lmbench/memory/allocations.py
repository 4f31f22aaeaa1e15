"""What is allocated when: a log of allocations, and from it the peak of each phase by category. Works without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmbench.memory.categories import Category

#: The caching allocator hands out multiples of this (c10/core/CachingDeviceAllocator.h, kMinBlockSize).
ROUNDED_TO_BYTES = 512


def rounded_bytes(size_bytes: int) -> int:
    """What the allocator hands out for a request."""
    return -(-size_bytes // ROUNDED_TO_BYTES) * ROUNDED_TO_BYTES


@dataclass(slots=True)
class Allocation:
    """One piece of memory. `born` and `died` are places in the order of all events; it lives from the one to just
    before the other, and to the end of the log where `died` is None."""

    size_bytes: int
    born: int
    category: Category | None
    made_by: str
    died: int | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a step between two events: of a phase, and within it of a named region."""

    start: int
    end: int
    phase: str
    region: str


@dataclass(frozen=True)
class Peak:
    """The most that lives at once within a stretch of events, by category, and the operator that reached it."""

    at: int
    total_bytes: int
    bytes_by_category: dict[Category, int]
    made_by: str


def peaks(allocations: Sequence[Allocation], stretches: Sequence[Stretch]) -> list[Peak]:
    """The peak of each stretch, what is there at its begin included. Every allocation has its category by now.

    Args:
        allocations: in any order.
        stretches: in order, without overlap.
    """
    changes: dict[int, int] = {}
    for one in allocations:
        changes[one.born] = changes.get(one.born, 0) + one.size_bytes
        if one.died is not None:
            changes[one.died] = changes.get(one.died, 0) - one.size_bytes
    places, total, next_place = sorted(changes), 0, 0
    found: list[tuple[int, int]] = []
    for stretch in stretches:
        while next_place < len(places) and places[next_place] <= stretch.start:
            total += changes[places[next_place]]
            next_place += 1
        most, at = total, stretch.start
        while next_place < len(places) and places[next_place] <= stretch.end:
            total += changes[places[next_place]]
            if total > most:
                most, at = total, places[next_place]
            next_place += 1
        found.append((at, most))
    return [_peak(allocations, at, most) for at, most in found]


def _peak(allocations: Sequence[Allocation], at: int, total_bytes: int) -> Peak:
    by_category: dict[Category, int] = {}
    latest: Allocation | None = None
    for one in allocations:
        if one.born <= at and (one.died is None or one.died > at):
            category = one.category or "unknown"
            by_category[category] = by_category.get(category, 0) + one.size_bytes
            if latest is None or one.born > latest.born:
                latest = one
    return Peak(at, total_bytes, by_category, latest.made_by if latest else "")
