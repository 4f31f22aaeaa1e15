"""What torch.compile keeps from the forward for the backward: AOTAutograd's graphs, cut by its own partitioner.

Nothing is generated: each graph is walked once a call, and of its values those are allocated that Inductor would write
to memory. The order of the graph is taken for that of the kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, cast
from unittest.mock import patch

import torch
from functorch.compile import (  # type: ignore[import-untyped]
    aot_module_simplified,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import CheckpointPolicy

from lmbench.memory.allocator import Allocation
from lmbench.memory.prediction.tracker import MATMULS, Tracker

# Kernels that Inductor calls and does not generate (torch/_inductor/lowering.py, fallbacks and templates): their inputs
# and outputs are in memory, whatever else is fused into one pass.
_EXTERN = ("mm", "bmm", "addmm", "baddbmm", "convolution", "index_put", "sort")
_EXTERN_PARTS = ("scaled_dot_product", "attention", "embedding_dense_backward", "convolution_backward", "cumsum")
_GETITEM = operator.getitem
# Views by another name: the result is its input.
_VIEWS = ("_unsafe_view", "alias", "detach", "lift_fresh_copy")


def simulate_compiled(target: nn.Module, tracker: Tracker) -> None:
    """Let the calls of a module allocate what they would allocate compiled."""
    graphs: dict[Any, Callable[..., Any]] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return target.forward(*args, **kwargs)
        flat, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        key = (spec, tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat))
        if key not in graphs:
            graphs[key] = _trace(target, flat, spec, tracker)
        return graphs[key](*[leaf for leaf in flat if isinstance(leaf, torch.Tensor)])

    target._compiled_call_impl = call


class _Region(nn.Module):
    """A module as a function of tensors alone, which enters the autocast that it is called under itself."""

    def __init__(self, target: nn.Module, flat: list[Any], spec: Any) -> None:
        super().__init__()
        self.target = target
        self._flat = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        self._spec = spec
        self._places = [place for place, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]
        self._autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None

    def forward(self, *tensors: torch.Tensor) -> Any:
        flat = list(self._flat)
        for place, tensor in zip(self._places, tensors, strict=True):
            flat[place] = tensor
        args, kwargs = torch.utils._pytree.tree_unflatten(flat, self._spec)
        with torch.autocast("cpu", dtype=self._autocast or torch.bfloat16, enabled=self._autocast is not None):
            out, self.out_spec = torch.utils._pytree.tree_flatten(self.target.forward(*args, **kwargs))
        return tuple(out)


def _trace(target: nn.Module, flat: list[Any], spec: Any, tracker: Tracker) -> Callable[..., Any]:
    region = _Region(target, flat, spec)

    def compiler(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        boxed: Callable[..., Any] = make_boxed_func(_Simulation(graph, tracker))
        return boxed

    with tracker.paused(), _checkpoints_tagged():
        compiled = aot_module_simplified(
            region,
            [leaf for leaf in flat if isinstance(leaf, torch.Tensor)],
            fw_compiler=compiler,
            bw_compiler=compiler,
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        )

    def run(*tensors: torch.Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            out = compiled(*tensors)
        return torch.utils._pytree.tree_unflatten(list(out), region.out_spec)

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


@dataclass
class _Step:
    """A value that is written to memory, and the values that are read for the last time for it."""

    node: fx.Node
    last_read: list[fx.Node]


class _Simulation:
    """Calls a graph: its outputs as fresh fake tensors, and on the way the rise and fall of its memory."""

    def __init__(self, graph: fx.GraphModule, tracker: Tracker) -> None:
        self.tracker = tracker
        self.inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        self.outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        _complete_values(graph)
        self._base = {node: _base(node) for node in graph.graph.nodes if node.op != "output"}
        self.steps = self._plan(graph)

    def _plan(self, graph: fx.GraphModule) -> list[_Step]:
        written = self._written(graph)
        reads: dict[fx.Node, set[fx.Node]] = {}
        last: dict[fx.Node, fx.Node] = {}
        steps = []
        for node in graph.graph.nodes:
            if node.op != "call_function":
                continue
            found: set[fx.Node] = set()
            for source in node.all_input_nodes:
                base = self._base[source]
                found |= {base} if base in written or base.op == "placeholder" else reads.get(base, set())
            reads[node] = found
            if node in written:
                steps.append(_Step(node, []))
                last.update(dict.fromkeys(found, node))
        kept = {self._base[node] for node in self.outputs if isinstance(node, fx.Node)}
        by_node = {step.node: step for step in steps}
        for value, reader in last.items():
            if value not in kept:
                by_node[reader].last_read.append(value)
        return steps

    def _written(self, graph: fx.GraphModule) -> set[fx.Node]:
        found = {self._base[node] for node in self.outputs if isinstance(node, fx.Node)}
        for node in graph.graph.nodes:
            if node.op == "call_function" and _is_extern(node):
                found |= {self._base[node], *(self._base[source] for source in node.all_input_nodes)}
        return {node for node in found if node.op == "call_function"}

    def __call__(self, *args: Any) -> list[Any]:
        tracker, made = self.tracker, {}
        values: dict[fx.Node, Any] = dict(zip(self.inputs, args, strict=True))
        passing: dict[fx.Node, list[Allocation]] = {}
        kept = {self._base[node] for node in self.outputs if isinstance(node, fx.Node)}
        for step in self.steps:
            node = step.node
            name = str(node.target)
            if _packet(node) in MATMULS:
                tracker.multiply()
            if node in kept:
                made[node] = [_fresh(value) for value in _values(node)]
            else:
                passing[node] = [
                    tracker.allocate(value.untyped_storage().nbytes(), None, name, value.numel())
                    for value in _values(node)
                ]
            for value in step.last_read:
                if value in passing:
                    for allocation in passing.pop(value):
                        tracker.free(allocation)
                elif isinstance(values.get(value), torch.Tensor):
                    allocation = tracker.note(values[value])
                    if allocation.category is None and tracker.phase == "backward":
                        tracker.free(allocation)
        for left in passing.values():
            for allocation in left:
                tracker.free(allocation)
        return [self._result(node, values, made) for node in self.outputs]

    def _result(self, node: Any, values: dict[fx.Node, Any], made: dict[fx.Node, list[torch.Tensor]]) -> Any:
        if not isinstance(node, fx.Node):
            return node
        base = self._base[node]
        if base.op == "placeholder" and base is node:
            return values[node]
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return value
        whole = values[base] if base.op == "placeholder" else _member(node, base, made[base])
        return torch.as_strided(whole, value.shape, value.stride(), value.storage_offset())


def _member(node: fx.Node, base: fx.Node, made: list[torch.Tensor]) -> torch.Tensor:
    """Which of an operator's results a node is a view of."""
    if len(made) == 1:
        return made[0]
    while not (node.target is _GETITEM and node.args[0] is base):
        node = node.all_input_nodes[0]
    tensors = [place for place, value in enumerate(base.meta["val"]) if isinstance(value, torch.Tensor)]
    return made[tensors.index(cast(int, node.args[1]))]


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory a node's value lies in."""
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    if node.target is _GETITEM:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if _packet(node) in _VIEWS:
        return True
    returns = node.target._schema.returns
    return bool(returns) and any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _is_extern(node: fx.Node) -> bool:
    name = _packet(node)
    return name in _EXTERN or any(part in name for part in _EXTERN_PARTS)


def _packet(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.rpartition("::")[2] if isinstance(target, torch._ops.OpOverload) else str(target)


def _values(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, torch.Tensor)]


def _complete_values(graph: fx.GraphModule) -> None:
    """An operator with several results that the partitioner put in again has its values at those who take them out."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            taken = {user.args[1]: user.meta.get("val") for user in node.users if user.target is _GETITEM}
            node.meta["val"] = tuple(taken.get(place) for place in range(max(taken, default=-1) + 1))


def _fresh(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
