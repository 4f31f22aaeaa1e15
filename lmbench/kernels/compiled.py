"""Parts of what compiled graphs ran, by the list of launches that the capture stored for each graph.

A call of a graph is found by the Triton kernels in it, whose names are their own. They mark the places, also where a
replayed CUDA graph ran everything without any operator; between two of them stand the kernels of the library calls that
the graph lists there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, takewhile

import numpy as np
import pandas as pd

from lmbench.kernels.events import where
from lmbench.kernels.host import Host
from lmbench.kernels.names import joined, part_of
from lmbench.kernels.recording import GraphNotes
from lmbench.records.intervals import NONE

TRITON = "triton_"
_GRAPH_CALL = "## Call CompiledFxGraph "
_LIBRARY_PREFIX = re.compile(r"extern_kernels\.|torch\.ops\.(aten\.)?|aten\.")
_PRODUCT_CALL = re.compile(r"^(mm|bmm|addmm|baddbmm|addbmm|_scaled_mm|_grouped_mm)$")
#: Adds up what a product split over its inner dimension; it belongs to the product before it.
_SPLIT_SUM = re.compile(r"split_?k_?reduce", re.IGNORECASE)

#: A launch that a graph lists, with its part; or a kernel that ran, with its kind.
Launch = tuple[str, str]
#: The launches of a compiled graph, in order: Triton kernels by their names, library calls by operator (`mm`).
Graph = list[Launch]


def read_graphs(stored: Iterable[GraphNotes], classes: Mapping[str, str]) -> list[Graph]:
    """The graphs of a trace's notes; `classes` are the modules' classes by path."""

    def launch(name: str, paths: list[str]) -> Launch:
        # Paths that tell nothing do not count.
        parts = {part for path in paths if (part := part_of(path, classes))}
        if not name.startswith(TRITON):
            # `mm` of `extern_kernels.mm` and of `torch.ops.aten.mm.default`.
            name = _LIBRARY_PREFIX.sub("", name, count=1).partition(".")[0]
        return name, joined(parts) if parts else ""

    return [[launch(*kernel) for kernel in graph.kernels] for graph in stored]


def parts_in_graphs(kernels: pd.DataFrame, host: Host, graphs: Sequence[Graph]) -> dict[int, str]:
    """Parts of the kernels that calls of compiled graphs launched, by kernel; empty for those that cannot be told."""
    parts: dict[int, str] = {}
    calls = host.nesting.innermost(where(host.names, lambda name: name.startswith(_GRAPH_CALL)))
    called = kernels.assign(call=np.append(calls, NONE)[kernels.around])
    # By launch, and within a launched CUDA graph by start.
    for _, members in called[called.call != NONE].sort_values(["launch_ns", "start_ns"]).groupby("call"):
        ran = list(zip(members["name"], members.kind, strict=True))
        parts |= zip(members.index, parts_of_call(graphs, ran), strict=True)
    return parts


def parts_of_call(graphs: Sequence[Graph], ran: Sequence[Launch]) -> list[str]:
    """Parts of the kernels that one call ran, names with kinds in its order; empty where they cannot be told.

    Nothing is told where no graph fits its Triton kernels, or where those that fit tell different parts.
    """
    launches = _graph_of(graphs, [name for name, _ in ran if name.startswith(TRITON)])
    anchors = {name for name, _ in launches if name.startswith(TRITON)}
    if not anchors:
        return [""] * len(ran)
    parts: list[str] = []
    for kernels, listed in zip(_stretches(ran, anchors), _stretches(launches, anchors), strict=True):
        of_anchor: list[str] = []
        if kernels and kernels[0][0] in anchors:
            # Inductor makes its own kernels of sums: one behind a mixed-order reduction adds up what that left.
            sums = takewhile(lambda kernel: kernel[1] == "reduction" and not kernel[0].startswith(TRITON), kernels[1:])
            of_anchor = [listed.pop(0)[1]] * len(["anchor", *sums])
        parts += of_anchor + _parts_between(listed, kernels[len(of_anchor) :])
    return parts


def _graph_of(graphs: Iterable[Graph], triton: Sequence[str]) -> Graph:
    """The graph that these Triton kernels can be a call of; empty without one, and where several tell different parts.

    What a graph lists was launched in its order. Inductor does not list every kernel (torch 2.11 none that reduces
    along two axes at once), so of several graphs those count that list the most of what was launched.
    """
    fitting = defaultdict[int, list[Graph]](list)
    for graph in graphs:
        listed = [name for name, _ in graph if name.startswith(TRITON)]
        known = set(listed)
        if [name for name in triton if name in known] == listed:
            fitting[len(listed)].append(graph)
    best = fitting[max(fitting, default=0)]
    return best[0] if best and all(graph == best[0] for graph in best) else []


def _stretches(launches: Sequence[Launch], anchors: set[str]) -> list[list[Launch]]:
    """What stands before the first anchor, and each anchor with what stands behind it."""
    stretches: list[list[Launch]] = [[]]
    for launch in launches:
        if launch[0] in anchors:
            stretches.append([])
        stretches[-1].append(launch)
    return stretches


def _parts_between(calls: Sequence[Launch], kernels: Sequence[Launch]) -> list[str]:
    """Parts of kernels that these library calls ran: all of one part, or each call with one main kernel of its kind."""
    # A Triton kernel that the graph does not list is no library call's.
    if len({part for _, part in calls}) == 1:
        return ["" if name.startswith(TRITON) else calls[0][1] for name, _ in kernels]
    # Where calls begin: every product, and the first of attention's kernels in a row.
    leads = [
        index
        for index, ((_, before), (name, kind)) in enumerate(pairwise([("", ""), *kernels]))
        if (kind == "gemm" and not _SPLIT_SUM.search(name)) or (kind == "attention" != before)
    ]
    # A call that can be any number of kernels of any kind is of none.
    expected = ["gemm" if _PRODUCT_CALL.match(n) else "attention" if "attention" in n else "" for n, _ in calls]
    parts = [""] * len(kernels)
    if [kernels[index][1] for index in leads] != expected:
        return parts
    for lead, (_, part) in zip(leads, calls, strict=True):
        parts[lead:] = [part] * (len(kernels) - lead)
    for index in reversed(range(len(kernels) - 1)):
        # A fill prepares what the product after it adds up.
        if kernels[index][1] == "memcpy" and parts[index + 1]:
            parts[index] = parts[index + 1]
    return ["" if name.startswith(TRITON) else part for (name, _), part in zip(kernels, parts, strict=True)]
