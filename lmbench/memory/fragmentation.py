"""Reserved memory that is in no block at the peak of a history: its holders, and the effect of expandable segments."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pandas as pd

from lmbench.memory.allocator import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, CachingAllocator, Piece
from lmbench.memory.blocks import rounded_bytes
from lmbench.memory.findings import Findings
from lmbench.memory.snapshot import GROWTH, Replay
from lmbench.records.intervals import paint, union

#: The category of a gap that is a whole segment.
FREE_SEGMENT = "free segments"
#: The largest difference between the simulated and the recorded reserved bytes, as a share. In histories of an H200
#: (tests/data/memory) it was 0 for four from a process's start, and 0.7 % for one that began after the warm-up.
_AGREEING_FRACTION = 0.01


def segments_at(played: Replay, entry: int) -> list[tuple[int, int]]:
    """The segments after an entry, each as its first address and the address behind it, in order."""
    later, final = played.entries.iloc[entry + 1 :], played.segments
    later = later[later["action"].isin(GROWTH)]
    first = np.append(later["address"], final["address"])
    sizes = np.append(later["size_bytes"], final["total_bytes"])
    # The next event about a piece of memory tells whether it was reserved before: a growth takes it, a shrinking frees
    # it. A piece without later events is as at the end.
    is_free = np.append(later["action"].map(GROWTH) > 0, [False] * len(final)).astype(bool)
    start, end, owner = paint(first, first + sizes, np.arange(len(first)))
    start, end = start[~is_free[owner]], end[~is_free[owner]]
    if final["is_expandable"].any():
        # The pieces by which a segment grew are one segment.
        start, end = union(start, end)
    return list(zip(start.tolist(), end.tolist(), strict=True))


def gaps(findings: Findings) -> Any:
    """The reserved memory in no block at the peak, a row for each alike holder; the largest total first.

    The holder of a gap is the block before it in its segment, or else the one behind it; a segment without blocks has
    none, and its category is FREE_SEGMENT. Columns are the holder's `category`, `size_bytes` and `user_frame`, the
    gaps' `count` and `total_bytes`, and the `largest_bytes` in one piece.
    """
    held, rows = findings.held.set_index("address").sort_index(), []
    for first, past in segments_at(findings.played, findings.peak["entry"]):
        blocks = held.loc[first : past - 1]
        holders = blocks[["category", "size_bytes", "user_frame"]].to_numpy().tolist()
        # A gap begins with its segment, or where a block ends.
        begins, ends = [first, *(blocks.index + blocks["size_bytes"])], [*blocks.index, past]
        for index, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            if end > begin:
                holder = holders[max(index - 1, 0)] if holders else [FREE_SEGMENT, end - begin, ""]
                rows.append((*holder, end - begin))
    frame = pd.DataFrame(rows, columns=["category", "size_bytes", "user_frame", "gap_bytes"])
    named = {"count": ("gap_bytes", "size"), "total_bytes": ("gap_bytes", "sum"), "largest_bytes": ("gap_bytes", "max")}
    groups = frame.groupby(["category", "size_bytes", "user_frame"], sort=False).agg(**named).reset_index()
    return groups.sort_values("total_bytes", ascending=False, kind="stable", ignore_index=True)


class ExpandableAllocator(CachingAllocator):
    """A model of the allocator with `expandable_segments:True`: one growing segment for each kind of requests.

    Rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13): a segment grows by pages, and every rest of a
    block is split off. Pages are never given back.
    """

    least_rest_bytes: ClassVar = {True: 512, False: 512}

    def __init__(self) -> None:
        super().__init__()
        #: The end of each kind's segment; addresses only have to differ.
        self._segment_ends = {True: 1 << 60, False: 0}

    def reserve(self, size_bytes: int, is_small: bool) -> Piece:
        """The free piece at the segment's end, grown by pages, or a new one behind it if it is in use."""
        end = self._segment_ends[is_small]
        last = self._ends.get(end, Piece(0, end, is_small))
        page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        grown_bytes = rounded_bytes(size_bytes - last.size_bytes, page_bytes)
        self.reserved_bytes += grown_bytes
        self._segment_ends[is_small] += grown_bytes
        if last.size_bytes:
            self._take(last)
        return self._give(last._replace(size_bytes=last.size_bytes + grown_bytes))


def expandable_bytes(findings: Findings) -> int | None:
    """The bytes that the allocator would have reserved at the peak with `expandable_segments:True`, simulated.

    None if they were expandable, or if the allocator as it was, simulated too, reserves other than it did: the history
    then lacks what came before it.
    """
    reserved_bytes, played = findings.peak["reserved_bytes"], findings.played
    if not played.has_history or played.segments["is_expandable"].any():
        return None
    difference = _simulated_bytes(findings, CachingAllocator()) - reserved_bytes
    if abs(difference) > _AGREEING_FRACTION * reserved_bytes:
        return None
    return _simulated_bytes(findings, ExpandableAllocator())


def _simulated_bytes(findings: Findings, allocator: CachingAllocator) -> int:
    """The bytes that an allocator has reserved when it has served the requests of a history up to its peak."""
    allocator.serve(findings.blocks[findings.blocks["start"] <= findings.peak["entry"]], "requested_bytes")
    return allocator.reserved_bytes
