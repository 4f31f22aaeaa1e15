"""The memory of a compiled module: AOTAutograd's graphs, cut into forward and backward by its own partitioner.

No code is generated. Each call walks its graph once, and allocates the values that Inductor would write to memory. The
order of the graph is taken for the order of the kernels.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
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
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from lmbench.instruments.compiling import framed
from lmbench.memory.fake_gpu import CudaAttention
from lmbench.memory.tracker import MATMULS, Tracker

# Operators whose kernels Inductor calls rather than generates (torch/_inductor/lowering.py, fallbacks and templates).
# Their inputs and outputs are in memory, even where everything else is fused into one pass.
_EXTERN = re.compile(
    "(mm|bmm|addmm|baddbmm|convolution|index_put|sort)$"
    "|.*(scaled_dot_product|attention|embedding_dense_backward|convolution_backward|cumsum)"
)


def simulate_compiled(targets: Iterable[nn.Module], tracker: Tracker) -> None:
    """Make the calls of modules allocate what they would allocate if these were compiled, each by itself.

    Dynamo traces them as in a real run: alike modules share a graph, a graph ends at FSDP2's hooks, and DDP's graphs
    are split by buckets.
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

    for target in targets:
        # FSDP2 gathers and frees parameters by hooks around `forward`, outside of the graph.
        target.forward = _simulated(target.forward, backend)


def _simulated(forward: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(framed(forward), backend=backend, dynamic=False)

    def simulated(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Each step that is tried has its own graphs, so lift Dynamo's limits on recompiling.
        limits = config.patch(recompile_limit=_MANY, accumulated_recompile_limit=_MANY)
        # Take `CudaAttention` off: Dynamo's graph would end where that mode handles an operator.
        with limits, _pop_mode_temporarily(), patch.object(CatchErrorsWrapper, "__call__", _without_modes):
            return compiled(*args, **kwargs)

    return simulated


_MANY = 2**20
#: Dynamo's tracing without modes such as the tracker: Dynamo skips frames under a mode, and traced calls must not be
#: tracked.
_without_modes = _disable_current_modes()(CatchErrorsWrapper.__call__)


def _simulation(nodes: Any, tracker: Tracker) -> Callable[..., list[Any]]:
    """A function that stands for a graph: it allocates and frees the graph's memory, and returns fresh fake outputs.

    The storages of the values that the graph was traced with tell which values share memory.
    """
    inputs = [node for node in nodes if node.op == "placeholder"]
    calls = [node for node in nodes if node.op == "call_function"]
    (outputs,) = next(node for node in nodes if node.op == "output").args
    _restore_values(calls)
    first_node = dict[int, fx.Node]()
    base = {}
    for node in nodes:
        # The base of a node is the node in which its storage appears first: for a view or a `getitem`, its source.
        base[node] = next(iter([first_node.setdefault(_storage(value), node) for value in _values(node)]), node)
    kept = {base[node] for node in outputs if isinstance(node, fx.Node)}
    steps = _plan(calls, base, kept)
    flops = sum(map(_flops, calls))

    def written(node: fx.Node) -> dict[int, torch.Tensor]:
        """Fresh tensors for the values of a node, by their storages."""
        tensors = {
            _storage(value): torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            for value in _values(node)
        }
        for tensor in tensors.values():
            tracker.note(tensor).made_by = str(node.target)
        return tensors

    def run(*args: Any) -> list[Any]:
        tracker.flops += flops
        values = dict(zip(inputs, args, strict=True))
        tensors = {_storage(value): values[node] for node in inputs for value in _values(node)}
        for node, last_read in steps.items():
            if _packet(node) in MATMULS:
                tracker.multiply()
            tensors |= written(node)
            for read in last_read:
                for value in _values(read):
                    tensors.pop(_storage(value), None)
                # The backward graph frees an input that the forward saved for it after the last read.
                if isinstance(values.get(read), torch.Tensor):
                    allocation = tracker.note(values[read])
                    if allocation.category is None and tracker.phase == "backward":
                        tracker.free(allocation)
        results = []
        for node in outputs:
            value = node.meta["val"] if isinstance(node, fx.Node) else node
            if isinstance(value, torch.Tensor) and node not in values:
                source = tensors.get(_storage(value))
                layout = (value.shape, value.stride(), value.storage_offset())
                value = torch.empty(0) if source is None else torch.as_strided(source, *layout)
            results.append(values.get(node, value))
        return results

    return run


def _restore_values(calls: list[Any]) -> None:
    """Give an operator with several results its values, which the partitioner leaves to its `getitem` users alone."""
    for node in calls:
        if "val" not in node.meta:
            items = {user.args[1]: user.meta.get("val") for user in node.users if user.target is operator.getitem}
            node.meta["val"] = tuple(items.get(index) for index in range(max(items, default=-1) + 1))


def _plan(calls: list[fx.Node], base: dict[fx.Node, fx.Node], kept: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that write to memory, in order, each with the nodes whose memory has its last read in that node."""
    sources = {node: {base[source] for source in node.all_input_nodes} for node in calls}
    extern = [node for node in calls if _EXTERN.match(_packet(node))]
    written = kept.union(*({base[node]} | sources[node] for node in extern))
    reads = dict[fx.Node, set[fx.Node]]()
    last = dict[fx.Node, fx.Node]()
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


def _flops(node: fx.Node) -> float:
    """The FLOPs of a matrix product or of fused attention; 0 of other operators."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    args, named = tree_map_only(fx.Node, lambda source: source.meta["val"], (node.args, node.kwargs))
    return float(formula(*args, **named, out_val=node.meta["val"]))


def _storage(value: torch.Tensor) -> int:
    """The identity of a value's storage, equal for values that share memory."""
    return int(value.untyped_storage()._cdata)


def _packet(node: fx.Node) -> str:
    """The name of a node's operator without its overload, such as `mm`."""
    target = node.target
    return target._schema.name.rpartition("::")[2] if isinstance(target, torch._ops.OpOverload) else str(target)


def _values(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node returns, without states of random generators: these are on the host, and unsized yet."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor) and isinstance(tensor.numel(), int)]
