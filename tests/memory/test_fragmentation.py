"""Reserved memory in no block, against histories that an H200 recorded, and expandable segments by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
from recorded_memory import foreign
from tables import cases

from lmbench.memory.allocator import CachingAllocator
from lmbench.memory.findings import examine
from lmbench.memory.fragmentation import ExpandableAllocator, expandable_bytes, gaps, segments_at

MIB = 1 << 20


@cases("name", "all", "ck", "late", "none", "oom", "python")
def test_gaps_fill_what_the_segments_of_the_peak_leave(name, tmp_path):
    findings = examine(foreign(tmp_path, name))
    peak = findings.peak
    assert sum(end - start for start, end in segments_at(findings.played, peak["entry"])) == peak["reserved_bytes"]
    assert gaps(findings)["total_bytes"].sum() == peak["reserved_bytes"] - peak["allocated_bytes"]
    # The simulation agrees with the H200 to the byte, unless the history lacks the first step.
    expandable = expandable_bytes(findings)
    if name in ("late", "none"):
        assert expandable is None
    else:
        assert peak["allocated_bytes"] <= expandable < 0.97 * peak["reserved_bytes"]


def test_an_expandable_segment_that_shrank_later_is_one():
    later = {"action": ["segment_unmap"], "address": [20 * MIB], "size_bytes": [20 * MIB]}
    first = {"action": ["segment_map"], "address": [0], "size_bytes": [40 * MIB]}
    segments = {"address": [0], "total_bytes": [20 * MIB], "is_expandable": [True]}
    entries = pd.concat([pd.DataFrame(first), pd.DataFrame(later)], ignore_index=True)
    played = SimpleNamespace(entries=entries, segments=pd.DataFrame(segments))
    assert segments_at(played, 0) == [(0, 40 * MIB)]
    assert segments_at(played, 1) == [(0, 20 * MIB)]


def test_expandable_segments_join_what_separate_ones_leave_apart():
    default, expandable = CachingAllocator(), ExpandableAllocator()
    for allocator in (default, expandable):
        small, *large = [allocator.allocate(size * MIB) for size in (0.5, 30, 30)]
        for block in large:
            allocator.free(block)
        first, second = allocator.allocate(50 * MIB), allocator.allocate(50 * MIB)
        assert allocator.allocated_bytes == 100.5 * MIB
        for block in (small, first, second):
            allocator.free(block)
        assert allocator.allocate(100 * MIB).size_bytes == 100 * MIB
    # Pages of 20 MiB: 60 for two blocks of 30, 40 more for two of 50; and 2 for the small one.
    assert (default.reserved_bytes, expandable.reserved_bytes) == (262 * MIB, 102 * MIB)
