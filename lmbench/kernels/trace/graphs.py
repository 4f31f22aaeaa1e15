"""Parts of kernels inside compiled graphs, by the list of launches that the capture stored for each graph."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lmbench.kernels.trace.parts import joined, part_of

TRITON = "triton_"
_LIBRARY_PREFIXES = ("extern_kernels.", "torch.ops.", "aten.")


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


def read_graphs(stored: Any, classes: Mapping[str, str]) -> list[CompiledGraph]:
    """The graphs of a trace's metadata (`compiled_graphs`); entries of another form are left out."""
    graphs = []
    for entry in stored if isinstance(stored, list) else []:
        kernels = entry.get("kernels") if isinstance(entry, dict) else None
        if not isinstance(kernels, list):
            continue
        launches = []
        for kernel in kernels:
            match kernel:
                case [str(name), list(paths)]:
                    launches.append((_bare(name), _part(paths, classes)))
        graphs.append(CompiledGraph(launches))
    return graphs


def _part(paths: Iterable[Any], classes: Mapping[str, str]) -> str:
    """Parts of the modules that were fused, empty if none tells; paths that tell nothing do not count."""
    found = {part for path in paths if isinstance(path, str) and (part := part_of(path, classes))}
    return joined(found) if found else ""


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
