"""The model part of each kernel that a compiled graph launched, by the launches that the recording stored per graph.

The Triton kernels of a call tell which graph was called: Inductor generates and names them for that graph. They also
align the call's kernels with the graph's list: kernels between two of them come from the library calls listed there.
This works for replayed CUDA graphs too, which run without any operator.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, takewhile

import pandas as pd

from lmbench.kernels.events import starting
from lmbench.kernels.host import HostEvents
from lmbench.kernels.names import joined, part_of
from lmbench.kernels.trace_notes import GraphNotes
from lmbench.records.intervals import NONE

TRITON = "triton_"
_GRAPH_CALL = "## Call CompiledFxGraph "
_LIBRARY_PREFIX = re.compile(r"extern_kernels\.|torch\.ops\.(aten\.)?|aten\.")
_PRODUCT_CALL = re.compile(r"^(mm|bmm|addmm|baddbmm|addbmm|_scaled_mm|_grouped_mm)$")
#: Kernels that sum the partial results of a product split over its inner dimension; each belongs to the product before.
_SPLIT_SUM = re.compile(r"split_?k_?reduce", re.IGNORECASE)

#: The name of a launch that a graph lists and its part; or the name of a kernel that ran and its kind.
Launch = tuple[str, str]
#: The launches of a compiled graph, in order: Triton kernels by their names, library calls by operator (`mm`).
CompiledGraph = list[Launch]


def read_graphs(stored: Iterable[GraphNotes], classes: Mapping[str, str]) -> list[CompiledGraph]:
    """The compiled graphs in a trace's notes; `classes` has the class name of each module by path."""

    def launch(name: str, paths: list[str]) -> Launch:
        # Ignore modules whose part is unknown.
        parts = {part for path in paths if (part := part_of(path, classes))}
        if not name.startswith(TRITON):
            # Shorten `extern_kernels.mm` and `torch.ops.aten.mm.default` to `mm`.
            name = _LIBRARY_PREFIX.sub("", name, count=1).partition(".")[0]
        return name, joined(parts) if parts else ""

    return [[launch(*kernel) for kernel in graph.kernels] for graph in stored]


def parts_in_graphs(kernels: pd.DataFrame, host: HostEvents, graphs: Sequence[CompiledGraph]) -> dict[int, str]:
    """The part of each kernel that a call of a compiled graph launched, by the kernel's index; empty if unknown."""
    parts: dict[int, str] = {}
    calls = host.nesting.innermost(starting(host.names, _GRAPH_CALL))
    kernels = kernels.assign(call=calls[kernels.around])
    # In the order of launches; kernels of one launched CUDA graph in the order of their starts.
    for _, members in kernels[kernels.call != NONE].sort_values(["launch_ns", "start_ns"]).groupby("call"):
        ran = list(zip(members["name"], members.kind, strict=True))
        parts |= zip(members.index, parts_of_call(graphs, ran), strict=True)
    return parts


def parts_of_call(graphs: Sequence[CompiledGraph], ran: Sequence[Launch]) -> list[str]:
    """The part of each kernel that one call ran, empty where it is unknown; `ran` has names and kinds in order.

    All parts are empty if no graph fits the call's Triton kernels, or if graphs that fit differ in their parts.
    """
    launches = _graph_of(graphs, [name for name, _ in ran if name.startswith(TRITON)])
    anchors = {name for name, _ in launches if name.startswith(TRITON)}
    if not anchors:
        return [""] * len(ran)
    parts = []
    for kernels, listed in zip(_split_at(ran, anchors), _split_at(launches, anchors), strict=True):
        anchor_parts = []
        if kernels and kernels[0][0] in anchors:
            # Inductor generates the sums of a graph itself. A library's sum right behind an anchor therefore finishes
            # that kernel's mixed-order reduction.
            sums = takewhile(lambda kernel: kernel[1] == "reduction" and not kernel[0].startswith(TRITON), kernels[1:])
            anchor_parts = [listed.pop(0)[1]] * len(["anchor", *sums])
        parts += anchor_parts + _parts_between(listed, kernels[len(anchor_parts) :])
    return parts


def _graph_of(graphs: Iterable[CompiledGraph], triton: Sequence[str]) -> CompiledGraph:
    """The graph whose call ran these Triton kernels; empty if none fits, or if graphs that fit differ.

    A graph fits if its listed Triton kernels were launched, all of them and in its order. Of these, the graphs with the
    most listed kernels are taken: Inductor does not list every kernel (in torch 2.11 none that reduces along two axes).
    """
    fitting = defaultdict[int, list[CompiledGraph]](list)
    for graph in graphs:
        listed = [name for name, _ in graph if name.startswith(TRITON)]
        listed_names = set(listed)
        if [name for name in triton if name in listed_names] == listed:
            fitting[len(listed)].append(graph)
    best = fitting[max(fitting, default=0)]
    return best[0] if best and all(graph == best[0] for graph in best) else []


def _split_at(launches: Sequence[Launch], anchors: set[str]) -> list[list[Launch]]:
    """The launches before the first anchor, then each anchor with the launches behind it."""
    stretches: list[list[Launch]] = [[]]
    for launch in launches:
        if launch[0] in anchors:
            stretches.append([])
        stretches[-1].append(launch)
    return stretches


def _parts_between(calls: Sequence[Launch], kernels: Sequence[Launch]) -> list[str]:
    """The part of each kernel that these library calls ran, empty where it is unknown.

    Known are the parts if all calls have the same, or if each call has one main kernel of its kind, in their order.
    Triton kernels that the graph does not list get no part: no library call launched them.
    """
    if len({part for _, part in calls}) == 1:
        return ["" if name.startswith(TRITON) else calls[0][1] for name, _ in kernels]
    # Main kernels: every product, and the first of several attention kernels in a row.
    leads = [
        index
        for index, ((_, before), (name, kind)) in enumerate(pairwise([("", ""), *kernels]))
        if (kind == "gemm" and not _SPLIT_SUM.search(name)) or (kind == "attention" and before != "attention")
    ]
    # Another call may run any kernels: "" equals no kind, so that no parts are given.
    expected = ["gemm" if _PRODUCT_CALL.match(n) else "attention" if "attention" in n else "" for n, _ in calls]
    parts = [""] * len(kernels)
    if [kernels[index][1] for index in leads] != expected:
        return parts
    for lead, (_, part) in zip(leads, calls, strict=True):
        parts[lead:] = [part] * (len(kernels) - lead)
    for index in reversed(range(len(kernels) - 1)):
        # A fill clears the memory that the next product adds its results to.
        if kernels[index][1] == "memcpy" and parts[index + 1]:
            parts[index] = parts[index + 1]
    return ["" if name.startswith(TRITON) else part for (name, _), part in zip(kernels, parts, strict=True)]
