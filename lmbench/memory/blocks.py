"""Frames of blocks, recorded or predicted: how much is held, when most of it, and for what.

A row is a block: `size_bytes` as the allocator takes it, its `category`, held from moment `start` (BEFORE the first)
until just before moment `end`. Moments count what happened to the allocator, from 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from lmbench.memory.recorded import CATEGORIES, Category
from lmbench.records.intervals import Integers

#: A block's start before the first moment.
BEFORE = -1


def rounded_bytes(size_bytes: int, to_bytes: int = 512) -> int:
    """The next multiple; the allocator rounds requests up to one of 512 (kMinBlockSize)."""
    return -(-size_bytes // to_bytes) * to_bytes


def held_bytes(blocks: Any, count: int, column: str = "size_bytes") -> Integers:
    """Sum of a column over the blocks that are held at each of `count` moments."""
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, np.maximum(blocks["start"], 0), blocks[column])
    np.subtract.at(change, blocks["end"], blocks[column])
    return change[:-1].cumsum()


def held_at(blocks: Any, moment: int) -> Any:
    """The blocks that are held at a moment."""
    return blocks[(blocks["start"] <= moment) & (blocks["end"] > moment)]


def by_category(blocks: Any) -> dict[Category, int]:
    """Bytes of blocks by category, those that there are."""
    sums = blocks.groupby("category")["size_bytes"].sum()
    return {name: int(sums[name]) for name in CATEGORIES if name in sums}


def highest_moments(allocated_bytes: Any, spans: Iterable[tuple[Any, int, int]]) -> dict[Any, int]:
    """By name of spans of moments, which have their first and last, the first moment at which most is allocated."""
    moments: dict[Any, int] = {}
    for name, first, last in spans:
        moment = first + int(np.argmax(allocated_bytes[first : last + 1]))
        if allocated_bytes[moment] > allocated_bytes[moments.setdefault(name, moment)]:
            moments[name] = moment
    return moments
