"""What torch.compile keeps from the forward for the backward: AOTAutograd's graphs, cut by its own partitioner.

Nothing is generated: each graph is walked once a call, and of its values those are allocated that Inductor would write
to memory. The order of the graph is taken for that of the kernels.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import fx, nn
from torch._dynamo import config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._inductor.decomposition import select_decomp_table
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from lmbench.memory.fake_gpu import MATMULS, CudaAttention, Tracker
from lmbench.memory.predictor import Allocation

# Kernels that Inductor calls and does not generate (torch/_inductor/lowering.py, fallbacks and templates): their inputs
# and outputs are in memory, whatever else is fused into one pass.
_EXTERN = frozenset({"mm", "bmm", "addmm", "baddbmm", "convolution", "index_put", "sort"})
_EXTERN_PARTS = re.compile("scaled_dot_product|attention|embedding_dense_backward|convolution_backward|cumsum")


def simulate_compiled(target: nn.Module, tracker: Tracker) -> None:
    """Let the calls of a module allocate what they would allocate compiled.

    Dynamo follows them as it would for real: a graph ends at FSDP2's hooks, and DDP's are split by buckets.
    """

    def compiler(graph: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(_simulation(graph.graph.nodes, tracker))

    trace = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        with CudaAttention():
            return trace(graph, inputs)

    forward = target.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    compiled = torch.compile(call, backend=backend, dynamic=False)

    def simulated(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Every module, of every step that is tried, has graphs of its own.
        limits = config.patch(recompile_limit=_MANY, accumulated_recompile_limit=_MANY)
        # Dynamo's graph would end where an operator is called by way of `CudaAttention`.
        with limits, _pop_mode_temporarily(), patch.object(CatchErrorsWrapper, "__call__", _without_modes):
            return compiled(*args, **kwargs)

    # FSDP2 gathers and frees by hooks around this, outside of the graph.
    target.forward = simulated


_MANY = 2**20
#: Dynamo leaves alone what runs under a mode, such as the tracker; what it traces must not be seen.
_without_modes = _disable_current_modes()(CatchErrorsWrapper.__call__)


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
                home = tensors.get(_storage(value))
                shape = (value.shape, value.stride(), value.storage_offset())
                value = torch.empty(0) if home is None else torch.as_strided(home, *shape)
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
    """What a node makes, but states of random generators: these lie on the host, and have no size before."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, torch.Tensor) and isinstance(each.numel(), int)]
