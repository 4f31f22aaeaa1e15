"""Parts of what a replayed CUDA graph ran, which no operator surrounds: by its place between the Triton kernels.

A replay runs what was captured in the order of the compiled graph's launches. Its Triton kernels have names of their
own and mark the places; between two of them stand the kernels of the library calls that the graph lists there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise

from lmbench.kernels.trace.graphs import TRITON, CompiledGraph, graphs_of

_PRODUCT_CALL = re.compile(r"^(mm|bmm|addmm|baddbmm|addbmm|_scaled_mm|_grouped_mm)$")
_ATTENTION_CALL = re.compile(r"attention")
#: Adds up what a product split over its inner dimension; it belongs to the product before it.
_SPLIT_SUM = re.compile(r"split_?k_?reduce", re.IGNORECASE)


def parts_of_replay(graphs: Sequence[CompiledGraph], names: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Parts of everything that one replay ran, in its order; empty where they cannot be told.

    Nothing is told where no graph fits its Triton kernels, or where those that fit tell different parts.
    """
    parts = [""] * len(names)
    fitting = graphs_of(graphs, [name for name in names if name.startswith(TRITON)])
    if not fitting or not fitting[0].triton or any(graph != fitting[0] for graph in fitting):
        return parts
    launches = fitting[0].launches
    listed = {name for name, _ in fitting[0].triton}
    gaps, anchors = _places(names, listed)
    listed_gaps, listed_anchors = _places([name for name, _ in launches], listed)
    for index, place in zip(anchors, listed_anchors, strict=True):
        parts[index] = launches[place][1]
    for before, gap, listed_gap in zip([None, *anchors], gaps, listed_gaps, strict=True):
        calls = [launches[place] for place in listed_gap]
        while before is not None and gap and kinds[gap[0]] == "reduction" and not names[gap[0]].startswith(TRITON):
            # Inductor makes its own kernels of sums; this one adds up what the mixed-order reduction before it left.
            parts[gap.pop(0)] = parts[before]
        between = _parts_between(calls, [names[index] for index in gap], [kinds[index] for index in gap])
        for index, part in zip(gap, between, strict=True):
            # A Triton kernel that the graph does not list is no library call's.
            parts[index] = "" if names[index].startswith(TRITON) else part
    return parts


def _places(names: Sequence[str], anchor_names: AbstractSet[str]) -> tuple[list[list[int]], list[int]]:
    """Indices of what stands before each anchor and behind the last, and of the anchors."""
    gaps: list[list[int]] = [[]]
    anchors = []
    for index, name in enumerate(names):
        if name in anchor_names:
            anchors.append(index)
            gaps.append([])
        else:
            gaps[-1].append(index)
    return gaps, anchors


def _parts_between(calls: list[tuple[str, str]], names: list[str], kinds: list[str]) -> list[str]:
    """Parts of kernels that these library calls ran: all of one part, or each call with one main kernel of its kind."""
    parts = [part for _, part in calls]
    if len(set(parts)) == 1:
        return parts[:1] * len(names)
    leads = _leads(names, kinds)
    if [kinds[index] for index in leads] != [_kind_of_call(name) for name, _ in calls]:
        return [""] * len(names)
    found = [""] * len(names)
    for (lead, end), part in zip(pairwise([*leads, len(names)]), parts, strict=True):
        found[lead:end] = [part] * (end - lead)
    for index in reversed(range(len(names) - 1)):
        # A fill prepares what the product after it adds up.
        if kinds[index] == "memcpy" and found[index + 1]:
            found[index] = found[index + 1]
    return found


def _leads(names: list[str], kinds: list[str]) -> list[int]:
    """Where calls begin: every product, and the first of attention's kernels in a row."""
    return [
        index
        for index, (name, kind) in enumerate(zip(names, kinds, strict=True))
        if (kind == "gemm" and not _SPLIT_SUM.search(name))
        or (kind == "attention" and (index == 0 or kinds[index - 1] != "attention"))
    ]


def _kind_of_call(name: str) -> str:
    """Kind of a library call's main kernel, empty where it can be any number of any kind."""
    if _PRODUCT_CALL.match(name):
        return "gemm"
    return "attention" if _ATTENTION_CALL.search(name) else ""
