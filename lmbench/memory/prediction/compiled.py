"""What torch.compile keeps from the forward for the backward: AOTAutograd's graphs, cut by its own partitioner.

Nothing is generated: each graph is walked once a call, and of its values those are allocated that Inductor would write
to memory. The order of the graph is taken for that of the kernels.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
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
_EXTERN = frozenset({"mm", "bmm", "addmm", "baddbmm", "convolution", "index_put", "sort"})
_EXTERN_PARTS = re.compile("scaled_dot_product|attention|embedding_dense_backward|convolution_backward|cumsum")


def simulate_compiled(target: nn.Module, tracker: Tracker) -> None:
    """Let the calls of a module allocate what they would allocate compiled."""
    graphs: dict[Any, Callable[..., Any]] = {}
    forward = target.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        flat, spec = tree_flatten((args, kwargs))
        tensors = _tensors(flat)
        # The class stands for each tensor: what is remembered shall keep none alive.
        others = [torch.Tensor if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        key = (spec, *others, *(tensor.shape for tensor in tensors))
        if key not in graphs:
            graphs[key] = _trace(_Region(target, forward, others, spec), tensors, tracker)
        return graphs[key](*tensors)

    # FSDP2 gathers and frees by hooks around this, outside of the graph.
    target.forward = call


def _tensors(leaves: Iterable[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class _Region(nn.Module):
    """A module as a function of tensors alone, which enters the autocast that it is called under itself."""

    def __init__(self, target: nn.Module, forward: Callable[..., Any], leaves: list[Any], spec: Any) -> None:
        super().__init__()
        self.target, self._forward, self._leaves, self._spec = target, forward, leaves, spec
        self._autocast = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")

    def forward(self, *tensors: torch.Tensor) -> Any:
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is torch.Tensor else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        with torch.autocast("cpu", *self._autocast):
            out, self.out_spec = tree_flatten(self._forward(*args, **kwargs))
        return tuple(out)


def _trace(region: _Region, tensors: list[torch.Tensor], tracker: Tracker) -> Callable[..., Any]:
    def compiler(graph: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(_simulation(graph.graph.nodes, tracker))

    with tracker.paused(), _checkpoints_tagged():
        compiled = aot_module_simplified(
            region,
            tensors,
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


def _simulation(nodes: Any, tracker: Tracker) -> Callable[..., list[Any]]:
    """A graph to be called: its outputs as fresh fake tensors, and on the way the rise and fall of its memory.

    The storages of the values that the graph was traced with tell which of them share memory.
    """
    inputs = [node for node in nodes if node.op == "placeholder"]
    calls = [node for node in nodes if node.op == "call_function"]
    (outputs,) = next(node for node in nodes if node.op == "output").args
    outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    for node in calls:
        if "val" not in node.meta:
            # An operator with several results that the partitioner put in again has its values at those who take them
            # out.
            taken = {user.args[1]: user.meta.get("val") for user in node.users if user.target is operator.getitem}
            node.meta["val"] = tuple(taken.get(index) for index in range(max(taken, default=-1) + 1))
    homes: dict[int, fx.Node] = {}
    base = {}
    for node in nodes:
        # Where a storage appears first; what only takes a value out of several has that of these.
        base[node] = next(iter([homes.setdefault(_storage(value), node) for value in _values(node)]), node)
    kept = {base[node] for node in outputs if isinstance(node, fx.Node)}
    steps = _plan(calls, base, kept)

    def run(*args: Any) -> list[Any]:
        passing: dict[fx.Node, list[Allocation]] = {}
        values = dict(zip(inputs, args, strict=True))
        tensors = {_storage(value): values[node] for node in inputs for value in _values(node)}
        for node, last_read in steps.items():
            if _packet(node) in MATMULS:
                tracker.multiply()
            if node in kept:
                for value in _values(node):
                    tensors[_storage(value)] = torch.empty_strided(
                        value.shape, value.stride(), dtype=value.dtype, device=value.device
                    )
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
        for node in outputs:
            value = node.meta["val"] if isinstance(node, fx.Node) else node
            if isinstance(value, torch.Tensor) and node not in values:
                value = torch.as_strided(tensors[_storage(value)], value.shape, value.stride(), value.storage_offset())
            results.append(values.get(node, value))
        return results

    return run


def _plan(calls: list[fx.Node], base: dict[fx.Node, fx.Node], kept: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that write to memory, each with the nodes whose memory is read for the last time for it."""
    sources = {node: {base[source] for source in node.all_input_nodes} for node in calls}
    extern = [node for node in calls if _packet(node) in _EXTERN or _EXTERN_PARTS.search(_packet(node))]
    written = kept.union(*({base[node]} | sources[node] for node in extern))
    reads: dict[fx.Node, set[fx.Node]] = {}
    last: dict[fx.Node, fx.Node] = {}
    for node in calls:
        in_memory = {source for source in sources[node] if source in written or source.op == "placeholder"}
        reads[node] = in_memory.union(*(reads.get(source, set()) for source in sources[node] - in_memory))
        if node in written:
            last.update(dict.fromkeys(reads[node], node))
    steps: dict[fx.Node, list[fx.Node]] = {node: [] for node in calls if node in written}
    for value, reader in last.items():
        if value not in kept:
            steps[reader].append(value)
    return steps


def _storage(value: torch.Tensor) -> int:
    """What values that share memory have in common."""
    return int(value.untyped_storage()._cdata)


def _packet(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.rpartition("::")[2] if isinstance(target, torch._ops.OpOverload) else str(target)


def _values(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return _tensors(value if isinstance(value, list | tuple) else [value])
