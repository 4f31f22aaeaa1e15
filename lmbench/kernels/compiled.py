"""Parts of what compiled graphs ran, by the list of launches that the capture stored for each graph.

A call of a graph is found by the Triton kernels in it, whose names are their own. What an operator launched in it is
looked up by name and order. A replayed CUDA graph ran everything without any operator; its Triton kernels mark the
places, and between two of them stand the kernels of the library calls that the graph lists there.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from lmbench.kernels.events import Events
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


@dataclass(frozen=True)
class CompiledGraph:
    """Name and part of every launch, in order: Triton kernels by their names, library calls by operator (`mm`)."""

    launches: list[Launch]

    @cached_property
    def triton(self) -> list[Launch]:
        """The launches of Triton kernels."""
        return [launch for launch in self.launches if launch[0].startswith(TRITON)]

    @cached_property
    def library(self) -> list[Launch]:
        """The calls of library operators."""
        return [launch for launch in self.launches if not launch[0].startswith(TRITON)]


def read_graphs(stored: Iterable[GraphNotes], classes: Mapping[str, str]) -> list[CompiledGraph]:
    """The graphs of a trace's notes; `classes` are the modules' classes by path."""

    def launch(name: str, paths: list[str]) -> Launch:
        # Paths that tell nothing do not count.
        parts = {part for path in paths if (part := part_of(path, classes))}
        if not name.startswith(TRITON):
            # `mm` of `extern_kernels.mm` and of `torch.ops.aten.mm.default`.
            name = _LIBRARY_PREFIX.sub("", name, count=1).partition(".")[0]
        return name, joined(parts) if parts else ""

    return [CompiledGraph([launch(*kernel) for kernel in graph.kernels]) for graph in stored]


def _fitting(graphs: Sequence[CompiledGraph], triton: Sequence[str]) -> list[CompiledGraph]:
    """The graphs that these Triton kernels can be a call of: what a graph lists was launched in its order.

    Inductor does not list every kernel (torch 2.11 none that reduces along two axes at once), so of several graphs
    those count that list the most of what was launched.
    """
    by_count: dict[int, list[CompiledGraph]] = defaultdict(list)
    for graph in graphs:
        listed = [name for name, _ in graph.triton]
        known = set(listed)
        if [name for name in triton if name in known] == listed:
            by_count[len(listed)].append(graph)
    return by_count[max(by_count)] if by_count else []


def parts_of_call(
    graphs: Sequence[CompiledGraph], triton: Sequence[str], library: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Parts of one call of a compiled graph: of its Triton kernels and of its library operators, each in launch order.

    Empty for all where no graph fits or where those that fit tell different parts, and for kernels that it does not
    list. Library calls count only where they fit too; operators that a graph does not list (copies) do not count.
    """
    fitting = _fitting(graphs, triton)

    def has_library_calls(graph: CompiledGraph) -> bool:
        listed = Counter(name for name, _ in graph.library)
        return Counter(name for name in library if name in listed) == listed

    exact = list(filter(has_library_calls, fitting))
    if exact and all(graph == exact[0] for graph in exact):
        return _in_order(exact[0].triton, triton), _in_order(exact[0].library, library)
    if triton and fitting and all(graph.triton == fitting[0].triton for graph in fitting):
        return _in_order(fitting[0].triton, triton), [""] * len(library)
    return [""] * len(triton), [""] * len(library)


def _in_order(launches: Sequence[Launch], names: Sequence[str]) -> list[str]:
    """The part of each name's k-th launch for the k-th time that it stands here."""
    waiting = {name: iter([part for other, part in launches if other == name]) for name in set(names)}
    return [next(waiting[name], "") for name in names]


def parts_in_graphs(
    kernels: Events,
    launched_ns: Integers,
    kinds: Sequence[str],
    around: Integers,
    host: Host,
    graphs: Sequence[CompiledGraph],
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
        operators = [host.child(int(around[index]), call) for index in members]
        names = [kernels.names[index] for index in members]
        parts |= zip(members, _by_name(graphs, host, names, operators), strict=True)
        replayed = [index for index, operator in zip(members, operators, strict=True) if operator == NONE]
        by_place = parts_of_replay(graphs, [kernels.names[i] for i in replayed], [kinds[i] for i in replayed])
        parts |= {index: part for index, part in zip(replayed, by_place, strict=True) if part}
    return parts


def _by_name(graphs: Sequence[CompiledGraph], host: Host, names: list[str], operators: list[int]) -> list[str]:
    """Parts of one call's kernels: of Triton's by their names, of others by the operators directly in the call."""
    triton = [name for name in names if name.startswith(TRITON)]
    library = sorted({event for event in operators if event != NONE and host.names[event].startswith("aten::")})
    by_kernel, by_call = parts_of_call(graphs, triton, [host.names[event].removeprefix("aten::") for event in library])
    by_operator = dict(zip(library, by_call, strict=True))
    in_order = iter(by_kernel)
    parts: list[str] = []
    for name, operator in zip(names, operators, strict=True):
        part = next(in_order) if name.startswith(TRITON) else by_operator.get(operator, "")
        if parts and not part and operator != NONE and host.names[operator] == "aten::sum":
            # Inductor makes its own kernels of sums; this one adds up what the mixed-order reduction before it left.
            part = parts[-1]
        parts.append(part)
    return parts


def parts_of_replay(graphs: Sequence[CompiledGraph], names: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Parts of everything that one replay ran, in its order; empty where they cannot be told.

    Nothing is told where no graph fits its Triton kernels, or where those that fit tell different parts.
    """
    fitting = _fitting(graphs, [name for name in names if name.startswith(TRITON)])
    if not fitting or not fitting[0].triton or any(graph != fitting[0] for graph in fitting):
        return [""] * len(names)
    listed = {name for name, _ in fitting[0].triton}
    parts: list[str] = []
    stretches = zip(_divided(names, listed), _divided([name for name, _ in fitting[0].launches], listed), strict=True)
    for (anchor, first, end), (listed_anchor, listed_first, listed_end) in stretches:
        begin = first
        if anchor is not None and listed_anchor is not None:
            parts.append(fitting[0].launches[listed_anchor][1])
        while parts and begin < end and kinds[begin] == "reduction" and not names[begin].startswith(TRITON):
            # Inductor makes its own kernels of sums; this one adds up what the mixed-order reduction before it left.
            parts.append(parts[-1])
            begin += 1
        between = _parts_between(fitting[0].launches[listed_first:listed_end], names[begin:end], kinds[begin:end])
        # A Triton kernel that the graph does not list is no library call's.
        parts += ["" if name.startswith(TRITON) else part for name, part in zip(names[begin:end], between, strict=True)]
    return parts


def _divided(names: Sequence[str], anchors: set[str]) -> list[tuple[int | None, int, int]]:
    """What stands before the first anchor, and behind each: the anchor's index (None for none), begin and end."""
    places = [index for index, name in enumerate(names) if name in anchors]
    return [
        (None, 0, [*places, len(names)][0]),
        *((place, place + 1, end) for place, end in pairwise([*places, len(names)])),
    ]


def _parts_between(calls: Sequence[Launch], names: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Parts of kernels that these library calls ran: all of one part, or each call with one main kernel of its kind."""
    if len({part for _, part in calls}) == 1:
        return [calls[0][1]] * len(names)
    # Where calls begin: every product, and the first of attention's kernels in a row.
    leads = [
        index
        for index, (name, kind) in enumerate(zip(names, kinds, strict=True))
        if (kind == "gemm" and not _SPLIT_SUM.search(name))
        or (kind == "attention" and (index == 0 or kinds[index - 1] != "attention"))
    ]
    if [kinds[index] for index in leads] != [_kind_of_call(name) for name, _ in calls]:
        return [""] * len(names)
    parts = [""] * len(names)
    for (lead, end), (_, part) in zip(pairwise([*leads, len(names)]), calls, strict=True):
        parts[lead:end] = [part] * (end - lead)
    for index in reversed(range(len(names) - 1)):
        # A fill prepares what the product after it adds up.
        if kinds[index] == "memcpy" and parts[index + 1]:
            parts[index] = parts[index + 1]
    return parts


def _kind_of_call(name: str) -> str:
    """Kind of a library call's main kernel, empty where it can be any number of any kind."""
    if _PRODUCT_CALL.match(name):
        return "gemm"
    return "attention" if "attention" in name else ""
