"""Parts of what compiled graphs ran, by the list of launches that the capture stored for each graph.

A call of a graph is found by the Triton kernels in it, whose names are their own. What an operator launched in it is
looked up by name and order. A replayed CUDA graph ran everything without any operator; its Triton kernels mark the
places, and between two of them stand the kernels of the library calls that the graph lists there.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from lmbench.kernels.recorded import GraphNotes
from lmbench.kernels.trace.events import NONE, Events, HostEvents, Integers
from lmbench.kernels.trace.parts import joined, part_of
from lmbench.kernels.trace.scopes import Scopes

TRITON = "triton_"
_LIBRARY_PREFIXES = ("extern_kernels.", "torch.ops.", "aten.")
_PRODUCT_CALL = re.compile(r"^(mm|bmm|addmm|baddbmm|addbmm|_scaled_mm|_grouped_mm)$")
_ATTENTION_CALL = re.compile(r"attention")
#: Adds up what a product split over its inner dimension; it belongs to the product before it.
_SPLIT_SUM = re.compile(r"split_?k_?reduce", re.IGNORECASE)


@dataclass(frozen=True)
class CompiledGraph:
    """Name and part of every launch, in order: Triton kernels by their names, library calls by operator (`mm`)."""

    launches: list[tuple[str, str]]

    @cached_property
    def triton(self) -> list[tuple[str, str]]:
        """The launches of Triton kernels."""
        return [launch for launch in self.launches if launch[0].startswith(TRITON)]

    @cached_property
    def library(self) -> list[tuple[str, str]]:
        """The calls of library operators."""
        return [launch for launch in self.launches if not launch[0].startswith(TRITON)]

    def has_library_calls(self, names: Sequence[str]) -> bool:
        """Whether these are the graph's library calls; operators that it does not list (copies) do not count."""
        listed = Counter(name for name, _ in self.library)
        return Counter(name for name in names if name in listed) == listed


def read_graphs(stored: Iterable[GraphNotes], classes: Mapping[str, str]) -> list[CompiledGraph]:
    """The graphs of a trace's notes; `classes` are the modules' classes by path."""
    graphs = []
    for graph in stored:
        launches = []
        for name, paths in graph.kernels:
            # Paths that tell nothing do not count.
            parts = {part for path in paths if (part := part_of(path, classes))}
            launches.append((_bare(name), joined(parts) if parts else ""))
        graphs.append(CompiledGraph(launches))
    return graphs


def _bare(name: str) -> str:
    """`mm` of `extern_kernels.mm` and of `torch.ops.aten.mm.default`."""
    if name.startswith(TRITON):
        return name
    for prefix in _LIBRARY_PREFIXES:
        name = name.removeprefix(prefix)
    return name.partition(".")[0]


def graphs_of(graphs: Sequence[CompiledGraph], triton: Sequence[str]) -> list[CompiledGraph]:
    """Those that these Triton kernels can be a call of: what a graph lists was launched in its order.

    Inductor does not list every kernel (torch 2.11 none that reduces along two axes at once), so of several graphs
    those count that list the most of what was launched.
    """
    found: dict[int, list[CompiledGraph]] = defaultdict(list)
    for graph in graphs:
        listed = [name for name, _ in graph.triton]
        known = set(listed)
        if [name for name in triton if name in known] == listed:
            found[len(listed)].append(graph)
    return found[max(found)] if found else []


def parts_of_call(
    graphs: Sequence[CompiledGraph], triton: Sequence[str], library: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Parts of one call of a compiled graph: of its Triton kernels and of its library operators, each in launch order.

    Empty for all where no graph fits or where those that fit tell different parts, and for kernels that it does not
    list. Library calls count only where they fit too.
    """
    candidates = graphs_of(graphs, triton)
    exact = [graph for graph in candidates if graph.has_library_calls(library)]
    if exact and all(graph == exact[0] for graph in exact):
        return _in_order(exact[0].triton, triton), _in_order(exact[0].library, library)
    if candidates and triton and all(graph.triton == candidates[0].triton for graph in candidates):
        return _in_order(candidates[0].triton, triton), [""] * len(library)
    return [""] * len(triton), [""] * len(library)


def _in_order(launches: Sequence[tuple[str, str]], names: Sequence[str]) -> list[str]:
    """The part of each name's k-th launch for the k-th time that it stands here."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for name, part in launches:
        by_name[name].append(part)
    waiting = {name: iter(parts) for name, parts in by_name.items()}
    return [next(waiting[name], "") if name in waiting else "" for name in names]


def parts_in_graphs(
    events: Events,
    host: HostEvents,
    scopes: Scopes,
    of_kernel: Integers,
    launch: Integers,
    kinds: Sequence[str],
    graphs: Sequence[CompiledGraph],
) -> dict[int, str]:
    """Parts of the kernels that calls of compiled graphs launched, by kernel; those that cannot be told are missing.

    `of_kernel` is each kernel's innermost host event, `launch` its launch, `kinds` its kind.
    """
    if not graphs:
        return {}
    calls: dict[int, list[int]] = defaultdict(list)
    for index in np.flatnonzero(of_kernel != NONE):
        if (call := int(scopes.graph[of_kernel[index]])) != NONE:
            calls[call].append(int(index))
    device, started = events.device, events.launches.start_ns
    found: dict[int, str] = {}
    for call, members in calls.items():
        # By launch, and within a launched CUDA graph by start.
        members.sort(key=lambda index: (int(started[launch[index]]), int(device.start_ns[index])))
        operators = [_child_of(call, int(of_kernel[index]), scopes) for index in members]
        names = [device.names[index] for index in members]
        found |= zip(members, _by_name(graphs, host, names, operators), strict=True)
        replayed = [index for index, operator in zip(members, operators, strict=True) if operator == NONE]
        parts = parts_of_replay(graphs, [device.names[i] for i in replayed], [kinds[i] for i in replayed])
        found |= {index: part for index, part in zip(replayed, parts, strict=True) if part}
    return {index: part for index, part in found.items() if part}


def _by_name(graphs: Sequence[CompiledGraph], host: HostEvents, names: list[str], operators: list[int]) -> list[str]:
    """Parts of one call's kernels: of Triton's by their names, of others by the operators directly in the call."""
    triton = [index for index, name in enumerate(names) if name.startswith(TRITON)]
    library = sorted({event for event in operators if event != NONE and host.names[event].startswith("aten::")})
    by_kernel, by_operator = parts_of_call(
        graphs, [names[index] for index in triton], [host.names[event].removeprefix("aten::") for event in library]
    )
    part_of_operator = dict(zip(library, by_operator, strict=True))
    parts = [part_of_operator.get(operator, "") for operator in operators]
    for index, part in zip(triton, by_kernel, strict=True):
        parts[index] = part
    for index, operator in enumerate(operators):
        # Inductor makes its own kernels of sums; this one adds up what the mixed-order reduction before it left.
        if index and operator != NONE and host.names[operator] == "aten::sum" and not parts[index]:
            parts[index] = parts[index - 1]
    return parts


def _child_of(call: int, event: int, scopes: Scopes) -> int:
    """The event directly in the call that an event lies in."""
    while event != NONE and int(scopes.parent[event]) != call:
        event = int(scopes.parent[event])
    return event


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
