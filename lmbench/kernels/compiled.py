"""Parts of what compiled graphs ran, by the list of launches that the capture stored for each graph.

A call of a graph is found by the Triton kernels in it, whose names are their own. What an operator launched in it is
looked up by name and order. A replayed CUDA graph ran everything without any operator; its Triton kernels mark the
places, and between two of them stand the kernels of the library calls that the graph lists there.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd

from lmbench.kernels.host import Host
from lmbench.kernels.parts import joined, part_of
from lmbench.kernels.recorded import GraphNotes
from lmbench.records.intervals import NONE, Integers

TRITON = "triton_"
_GRAPH_CALL = "## Call CompiledFxGraph "
_LIBRARY_PREFIX = re.compile(r"extern_kernels\.|torch\.ops\.(aten\.)?|aten\.")
_PRODUCT_CALL = re.compile(r"^(mm|bmm|addmm|baddbmm|addbmm|_scaled_mm|_grouped_mm)$")
#: Adds up what a product split over its inner dimension; it belongs to the product before it.
_SPLIT_SUM = re.compile(r"split_?k_?reduce", re.IGNORECASE)

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


def _fitting(graphs: Iterable[Graph], triton: Iterable[str]) -> list[Graph]:
    """The graphs that these Triton kernels can be a call of: what a graph lists was launched in its order.

    Inductor does not list every kernel (torch 2.11 none that reduces along two axes at once), so of several graphs
    those count that list the most of what was launched.
    """
    by_count: dict[int, list[Graph]] = defaultdict(list)
    for graph in graphs:
        listed = list(filter(_is_triton, [name for name, _ in graph]))
        known = set(listed)
        if [name for name in triton if name in known] == listed:
            by_count[len(listed)].append(graph)
    return by_count[max(by_count)] if by_count else []


def _is_triton(name: str) -> bool:
    return name.startswith(TRITON)


def _agreed(graphs: Sequence[Graph]) -> Graph:
    """The launches that all graphs have, none where two differ."""
    return graphs[0] if graphs and all(graph == graphs[0] for graph in graphs) else []


def parts_of_call(
    graphs: Iterable[Graph], triton: Sequence[str], library: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Parts of one call of a compiled graph: of its Triton kernels and of its library operators, each in launch order.

    Empty for all where no graph fits or where those that fit tell different parts, and for kernels that it does not
    list. Library calls count only where they fit too; operators that a graph does not list (copies) do not count.
    """
    fitting, called = _fitting(graphs, triton), Counter(library)
    listed = [Counter(name for name, _ in graph if not _is_triton(name)) for graph in fitting]
    exact = [graph for graph, names in zip(fitting, listed, strict=True) if {n: called[n] for n in names} == names]
    # Without the library calls the Triton kernels may still tell.
    kernels = [[launch for launch in graph if _is_triton(launch[0])] for graph in fitting] if triton else []
    launches = _agreed(exact) or _agreed(kernels)
    waiting = {name: iter([part for other, part in launches if other == name]) for name in {*triton, *library}}
    # The k-th launch of a name has the part of the k-th that is listed.
    parts = [next(waiting[name], "") for name in (*triton, *library)]
    return parts[: len(triton)], parts[len(triton) :]


def parts_in_graphs(
    kernels: pd.DataFrame,
    launched_ns: Integers,
    kinds: Sequence[str],
    around: Integers,
    host: Host,
    graphs: Sequence[Graph],
) -> dict[int, str]:
    """Parts of the kernels that calls of compiled graphs launched, by kernel; those that cannot be told are missing.

    `launched_ns` is when each kernel was launched, `around` the innermost event of the host then, `kinds` its kind.
    """
    calls: dict[int, list[int]] = defaultdict(list)
    for index in np.flatnonzero(around != NONE).tolist() if graphs else ():
        for event in host.nesting.climb(int(around[index])):
            if host.names[event].startswith(_GRAPH_CALL):
                calls[event].append(index)
                break
    parts: dict[int, str] = {}
    for call, members in calls.items():
        # By launch, and within a launched CUDA graph by start.
        members.sort(key=lambda index: (launched_ns[index], kernels.start_ns[index]))
        names = [kernels.name[index] for index in members]
        operators = [host.child(int(around[index]), call) for index in members]
        called = {event: "" if event == NONE else host.names[event] for event in sorted(set(operators))}
        library = [event for event in called if called[event].startswith("aten::")]
        by_kernel, by_call = parts_of_call(
            graphs, list(filter(_is_triton, names)), [called[event].removeprefix("aten::") for event in library]
        )
        of_triton, of_operator, part = iter(by_kernel), dict(zip(library, by_call, strict=True)), ""
        for index, name, operator in zip(members, names, operators, strict=True):
            before, part = part, next(of_triton) if _is_triton(name) else of_operator.get(operator, "")
            if not part and called[operator] == "aten::sum":
                # Inductor makes its own kernels of sums: this one adds up what the reduction before it left.
                part = before
            parts[index] = part
        replayed = [index for index, operator in zip(members, operators, strict=True) if operator == NONE]
        by_place = parts_of_replay(graphs, [kernels.name[i] for i in replayed], [kinds[i] for i in replayed])
        parts |= {index: part for index, part in zip(replayed, by_place, strict=True) if part}
    return parts


def parts_of_replay(graphs: Sequence[Graph], names: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Parts of everything that one replay ran, in its order; empty where they cannot be told.

    Nothing is told where no graph fits its Triton kernels, or where those that fit tell different parts.
    """
    launches = _agreed(_fitting(graphs, list(filter(_is_triton, names))))
    anchors = {name for name, _ in launches if _is_triton(name)}
    if not anchors:
        return [""] * len(names)
    parts: list[str] = []
    stretches = zip(_stretches(names, anchors), _stretches([name for name, _ in launches], anchors), strict=True)
    for place, (stretch, listed) in enumerate(stretches):
        begin, calls = stretch.start, launches[listed]
        if place:
            parts.append(calls.pop(0)[1])
            begin += 1
        while parts and begin < stretch.stop and kinds[begin] == "reduction" and not _is_triton(names[begin]):
            # Inductor makes its own kernels of sums; this one adds up what the mixed-order reduction before it left.
            parts.append(parts[-1])
            begin += 1
        between = _parts_between(calls, names[begin : stretch.stop], kinds[begin : stretch.stop])
        # A Triton kernel that the graph does not list is no library call's.
        parts += ["" if _is_triton(name) else part for name, part in zip(names[begin:], between, strict=False)]
    return parts


def _stretches(names: Sequence[str], anchors: set[str]) -> list[slice]:
    """What stands before the first anchor, and each anchor with what stands behind it."""
    places = [index for index, name in enumerate(names) if name in anchors]
    return [slice(begin, end) for begin, end in pairwise([0, *places, len(names)])]


def _parts_between(calls: Sequence[Launch], names: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Parts of kernels that these library calls ran: all of one part, or each call with one main kernel of its kind."""
    if len({part for _, part in calls}) == 1:
        return [calls[0][1]] * len(names)
    # Where calls begin: every product, and the first of attention's kernels in a row.
    leads = [
        index
        for index, (before, kind) in enumerate(pairwise(["", *kinds]))
        if (kind == "gemm" and not _SPLIT_SUM.search(names[index])) or (kind == "attention" != before)
    ]
    # A call that can be any number of kernels of any kind is of none.
    expected = ["gemm" if _PRODUCT_CALL.match(n) else "attention" if "attention" in n else "" for n, _ in calls]
    parts = [""] * len(names)
    if [kinds[index] for index in leads] != expected:
        return parts
    for (lead, end), (_, part) in zip(pairwise([*leads, len(names)]), calls, strict=True):
        parts[lead:end] = [part] * (end - lead)
    for index in reversed(range(len(names) - 1)):
        # A fill prepares what the product after it adds up.
        if kinds[index] == "memcpy" and parts[index + 1]:
            parts[index] = parts[index + 1]
    return parts
