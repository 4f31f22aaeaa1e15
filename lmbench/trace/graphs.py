"""Parts of kernels inside compiled graphs, by the list of launches that the capture stored for each graph."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lmbench.trace.parts import joined, part_of

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
    def library(self) -> dict[str, list[str]]:
        """By operator, the parts of its calls."""
        found: dict[str, list[str]] = defaultdict(list)
        for name, part in self.launches:
            if not name.startswith(TRITON):
                found[name].append(part)
        return dict(found)

    def has_library_calls(self, names: Sequence[str]) -> bool:
        """Whether these are the graph's library calls; operators that it does not list (copies) do not count."""
        counts = Counter(name for name in names if name in self.library)
        return counts == Counter({name: len(parts) for name, parts in self.library.items()})


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
    """Those with these Triton kernels, in this order."""
    names = list(triton)
    return [graph for graph in graphs if [name for name, _ in graph.triton] == names]


def parts_of_call(
    graphs: Sequence[CompiledGraph], triton: Sequence[str], library: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Parts of one call of a compiled graph: of its Triton kernels and of its library operators, each in launch order.

    The graph is the one with these Triton kernels in this order; empty for all where there is none or where those that
    fit tell different parts. Library calls count only where they fit too.
    """
    candidates = graphs_of(graphs, triton)
    exact = [graph for graph in candidates if graph.has_library_calls(library)]
    no_library = [""] * len(library)
    if exact and all(graph == exact[0] for graph in exact):
        waiting = {name: iter(of_name) for name, of_name in exact[0].library.items()}
        parts = [next(waiting[name], "") if name in waiting else "" for name in library]
        return [part for _, part in exact[0].triton], parts
    if candidates and triton and all(graph.triton == candidates[0].triton for graph in candidates):
        return [part for _, part in candidates[0].triton], no_library
    return [""] * len(triton), no_library
