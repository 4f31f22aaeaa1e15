"""What is allocated when: a log of allocations, and from it the peak of each phase by category. Works without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmbench.memory.caching_allocator import Block, CachingAllocator
from lmbench.memory.categories import Category


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
    """The most that is allocated at once within a stretch, by category, and the operator that reached it.

    `reserved_bytes` is what the allocator holds at the stretch's end: it gives nothing back.
    """

    total_bytes: int
    bytes_by_category: dict[Category, int]
    made_by: str
    reserved_bytes: int


def replay(allocations: Sequence[Allocation], stretches: Sequence[Stretch]) -> list[Peak]:
    """The peak of each stretch, what is there at its begin included, as the caching allocator would have it.

    Args:
        allocations: from the first of the process on, in any order. Every one has its category by now.
        stretches: in order, without overlap.
    """
    events = [(one.born, one) for one in allocations if one.size_bytes]
    events += [(one.died, one) for one in allocations if one.size_bytes and one.died is not None]
    events.sort(key=lambda event: event[0])
    allocator, blocks, sizes = CachingAllocator(), dict[int, Block](), dict[int, int]()
    found: list[tuple[int, int, int]] = []
    next_event = 0
    for stretch in stretches:
        most, at = -1, stretch.start
        while True:
            is_inside = next_event < len(events) and events[next_event][0] <= stretch.end
            place = events[next_event][0] if is_inside else stretch.end + 1
            if place > stretch.start and allocator.allocated_bytes > most:
                most, at = allocator.allocated_bytes, max(stretch.start, place - 1)
            if not is_inside:
                break
            _, one = events[next_event]
            next_event += 1
            if id(one) in blocks:
                allocator.free(blocks.pop(id(one)))
            else:
                blocks[id(one)] = allocator.allocate(one.size_bytes)
                sizes[id(one)] = blocks[id(one)].size_bytes
        found.append((at, most, allocator.reserved_bytes))
    return [_peak(allocations, sizes, *each) for each in found]


def _peak(
    allocations: Sequence[Allocation], sizes: dict[int, int], at: int, total_bytes: int, reserved_bytes: int
) -> Peak:
    by_category: dict[Category, int] = {}
    latest: Allocation | None = None
    for one in allocations:
        if one.born <= at and (one.died is None or one.died > at) and one.size_bytes:
            category = one.category or "unknown"
            by_category[category] = by_category.get(category, 0) + sizes[id(one)]
            if latest is None or one.born > latest.born:
                latest = one
    return Peak(total_bytes, by_category, latest.made_by if latest else "", reserved_bytes)
