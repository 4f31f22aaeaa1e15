"""What torch.compile keeps from the forward for the backward: AOTAutograd's graphs, cut by its own partitioner.

Nothing is generated: each graph is walked once a call, and of its values those are allocated that Inductor would write
to memory. The order of the graph is taken for that of the kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from typing import Any
from unittest.mock import patch

import torch
from functorch.compile import (  # type: ignore[import-untyped]
    aot_module_simplified,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from lmbench.memory.allocator import Allocation
from lmbench.memory.prediction.tracker import MATMULS, Tracker

# Kernels that Inductor calls and does not generate (torch/_inductor/lowering.py, fallbacks and templates): their inputs
# and outputs are in memory, whatever else is fused into one pass.
_EXTERN = ("mm", "bmm", "addmm", "baddbmm", "convolution", "index_put", "sort")
_EXTERN_PARTS = ("scaled_dot_product", "attention", "embedding_dense_backward", "convolution_backward", "cumsum")
_GETITEM = operator.getitem


def simulate_compiled(target: nn.Module, tracker: Tracker) -> None:
    """Let the calls of a module allocate what they would allocate compiled."""
    graphs: dict[Any, Callable[..., Any]] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return target.forward(*args, **kwargs)
        flat, spec = tree_flatten((args, kwargs))
        key = (spec, tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat))
        if key not in graphs:
            graphs[key] = _trace(target, flat, spec, tracker)
        return graphs[key](*_tensors(flat))

    target._compiled_call_impl = call


def _tensors(leaves: list[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class _Region(nn.Module):
    """A module as a function of tensors alone, which enters the autocast that it is called under itself."""

    def __init__(self, target: nn.Module, flat: list[Any], spec: Any) -> None:
        super().__init__()
        self.target, self._spec = target, spec
        self._others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in flat]
        self._autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None

    def forward(self, *tensors: torch.Tensor) -> Any:
        remaining = iter(tensors)
        leaves = zip(self._others, self._is_tensor, strict=True)
        args, kwargs = tree_unflatten([next(remaining) if is_one else other for other, is_one in leaves], self._spec)
        with torch.autocast("cpu", dtype=self._autocast or torch.bfloat16, enabled=self._autocast is not None):
            out, self.out_spec = tree_flatten(self.target.forward(*args, **kwargs))
        return tuple(out)


def _trace(target: nn.Module, flat: list[Any], spec: Any, tracker: Tracker) -> Callable[..., Any]:
    region = _Region(target, flat, spec)

    def compiler(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        boxed: Callable[..., Any] = make_boxed_func(_Simulation(graph, tracker))
        return boxed

    with tracker.paused(), _checkpoints_tagged():
        compiled = aot_module_simplified(
            region,
            _tensors(flat),
            fw_compiler=compiler,
            bw_compiler=compiler,
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        )

    def run(*tensors: torch.Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return tree_unflatten(list(compiled(*tensors)), region.out_spec)

    return run


@contextmanager
def _checkpoints_tagged() -> Iterator[None]:
    """Tell the partitioner what is checkpointed as torch.compile does: by tags on the nodes of each such call.

    The call itself would be traced with its second run, which is then merged with the first.
    """
    numbers = count()

    def tag(function: Any, preserve_rng_state: Any, context_fn: Any, *_: Any, **__: Any) -> Iterator[None]:
        with fx.traceback.preserve_node_meta():
            meta = fx.traceback.current_meta
            before = dict(meta)
            number = next(numbers)
            meta.update(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=number)
            # A choice of what is kept writes its own tags, with the number that it is given.
            choice = context_fn()[0]
            choice.ac_graph_id = number
            with choice:
                yield
            meta.clear()
            meta.update(before)

    with patch.object(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", tag):
        yield


class _Simulation:
    """Calls a graph: its outputs as fresh fake tensors, and on the way the rise and fall of its memory.

    The storages of the values that the graph was traced with tell which of them share memory. `steps` are the nodes
    that write to memory, each with the nodes whose memory is read for the last time for it.
    """

    def __init__(self, graph: fx.GraphModule, tracker: Tracker) -> None:
        self.tracker = tracker
        nodes = graph.graph.nodes
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        outputs = next(node for node in nodes if node.op == "output").args[0]
        self.outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        calls = [node for node in nodes if node.op == "call_function"]
        _complete_values(calls)
        homes: dict[int, fx.Node] = {}
        self._base = {}
        for node in nodes:
            # Where a storage appears first; what only takes a value out of several has that of these.
            places = [homes.setdefault(_storage(value), node) for value in _values(node)]
            self._base[node] = places[0] if places else node
        self._kept = {self._base[node] for node in self.outputs if isinstance(node, fx.Node)}
        self.steps = self._plan(calls)

    def _plan(self, calls: list[fx.Node]) -> list[tuple[fx.Node, list[fx.Node]]]:
        written = set(self._kept)
        for node in filter(_is_extern, calls):
            written |= {self._base[node], *(self._base[source] for source in node.all_input_nodes)}
        reads: dict[fx.Node, set[fx.Node]] = {}
        last: dict[fx.Node, fx.Node] = {}
        for node in calls:
            sources: set[fx.Node] = set()
            for base in (self._base[source] for source in node.all_input_nodes):
                sources |= {base} if base in written or base.op == "placeholder" else reads.get(base, set())
            reads[node] = sources
            if node in written:
                last.update(dict.fromkeys(sources, node))
        steps: dict[fx.Node, list[fx.Node]] = {node: [] for node in calls if node in written}
        for value, reader in last.items():
            if value not in self._kept:
                steps[reader].append(value)
        return list(steps.items())

    def __call__(self, *args: Any) -> list[Any]:
        tracker, passing = self.tracker, dict[fx.Node, list[Allocation]]()
        values: dict[fx.Node, Any] = dict(zip(self.inputs, args, strict=True))
        tensors = {_storage(value): values[node] for node in self.inputs for value in _values(node)}
        for node, last_read in self.steps:
            if _packet(node) in MATMULS:
                tracker.multiply()
            if node in self._kept:
                tensors |= {_storage(value): _fresh(value) for value in _values(node)}
            else:
                passing[node] = [
                    tracker.allocate(value.untyped_storage().nbytes(), None, str(node.target), value.numel())
                    for value in _values(node)
                ]
            for read in last_read:
                for allocation in passing.pop(read, []):
                    tracker.free(allocation)
                if isinstance(values.get(read), torch.Tensor):
                    allocation = tracker.note(values[read])
                    if allocation.category is None and tracker.phase == "backward":
                        tracker.free(allocation)
        for allocation in chain.from_iterable(passing.values()):
            tracker.free(allocation)
        results = []
        for node in self.outputs:
            value = node.meta["val"] if isinstance(node, fx.Node) else node
            if isinstance(value, torch.Tensor) and node not in values:
                value = torch.as_strided(tensors[_storage(value)], value.shape, value.stride(), value.storage_offset())
            results.append(values.get(node, value))
        return results


def _storage(value: torch.Tensor) -> int:
    """What values that share memory have in common."""
    return int(value.untyped_storage()._cdata)


def _is_extern(node: fx.Node) -> bool:
    name = _packet(node)
    return name in _EXTERN or any(part in name for part in _EXTERN_PARTS)


def _packet(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.rpartition("::")[2] if isinstance(target, torch._ops.OpOverload) else str(target)


def _values(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [part for part in (value if isinstance(value, list | tuple) else [value]) if isinstance(part, torch.Tensor)]


def _complete_values(calls: list[Any]) -> None:
    """An operator with several results that the partitioner put in again has its values at those who take them out."""
    for node in calls:
        if "val" not in node.meta:
            taken = {user.args[1]: user.meta.get("val") for user in node.users if user.target is _GETITEM}
            node.meta["val"] = tuple(taken.get(index) for index in range(max(taken, default=-1) + 1))


def _fresh(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
