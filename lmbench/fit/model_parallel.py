"""`--trainer.strategy fsdp2`, `fsdp2_zero2` and `tensor_parallel`: FSDP2 block by block, matrices split over devices,
or both, under Lightning's own strategy."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lmbench.errors import UsageError, check_groups, unknown
from lmbench.fit.mixed_precision import Fp8Precision
from lmbench.instruments.compiling import CompileOptions, compile_targets
from lmbench.precision import find_precision


class SharedInput(ParallelStyle):
    """A layer's input is one for all matrices in it that are split by columns, so that the gradients which these have
    of it are summed before the devices add them up."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def share(
            _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if inputs:
                return (_as_copies(inputs[0], device_mesh), *inputs[1:]), named
            return inputs, {**named, "hidden_states": _as_copies(named["hidden_states"], device_mesh)}

        module.register_forward_pre_hook(share, with_kwargs=True)
        return module


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel, "rowwise": RowwiseParallel, "shared_input": SharedInput,
}  # fmt: skip


class ModelParallel(ModelParallelStrategy):
    """Splits the matrices that a module names over `tensor_parallel_size` devices, and shards each of its alike blocks,
    then the rest, over groups of so many.

    A module that does either itself, in its `configure_model`, is left as it is. With bf16-mixed, sharded blocks
    compute on gathered bf16 parameters, and gradients are reduced in float32.

    Args:
        tensor_parallel_size: devices that compute a batch together; auto is those of a node. What is split is what the
            module's `tensor_parallel_plan(size)` returns: names of linear layers, with `*` for a part, and of each
            colwise, rowwise, or a style of torch.distributed.tensor.parallel; and of a layer around some shared_input.
        reshard_after_forward: free gathered parameters after the forward, and gather them again in the backward.
        reduce_each_micro_batch: reduce gradients in every micro-batch; false keeps them whole until the last one, which
            takes memory for less communication.

    Raises:
        UsageError: the size does not divide the devices, or (in ``setup``) the module has no such plan.
    """

    def __init__(
        self,
        tensor_parallel_size: int | Literal["auto"] = 1,
        reshard_after_forward: bool = True,
        reduce_each_micro_batch: bool = True,
    ) -> None:
        super().__init__(tensor_parallel_size=tensor_parallel_size)
        self._reshards, self._reduces_each = reshard_after_forward, reduce_each_micro_batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        module = self.lightning_module
        if module is not None and not self._reduces_each:
            is_last = (batch_idx + 1) % module.trainer.accumulate_grad_batches == 0
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.set_requires_gradient_sync(is_last, recurse=False)

    def setup_environment(self) -> None:
        size = self.num_processes if self._tensor_parallel_size == "auto" else self._tensor_parallel_size
        count = self.num_processes * self.num_nodes
        check_groups(size, count)
        self._data_parallel_size, self._tensor_parallel_size = count // size, size
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        module = self.model
        assert isinstance(module, LightningModule)
        self.parallelize(module, str(trainer.precision))
        if not is_overridden("configure_model", module):
            # Lightning insists on it, also where there is nothing left to shard.
            module.configure_model = lambda: None  # type: ignore[method-assign]
        super().setup(trainer)

    def parallelize(self, module: LightningModule, precision: str) -> None:
        """Split and shard a module over the mesh, as far as it has not done that itself."""
        # On the device: a mesh of GPUs takes no tensor of the host's.
        self.model_to_device()
        groups, group = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        if group.size() > 1 and not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            split(module, group)
        is_sharded = any(isinstance(part, FSDPModule) for part in module.modules())
        if not is_sharded and (groups.size() > 1 or group.size() == 1):
            if isinstance(self.precision_plugin, Fp8Precision):
                self.precision_plugin.convert_module(module)
            self._shard(module, precision, groups)

    def _shard(self, module: LightningModule, precision: str, mesh: DeviceMesh) -> None:
        meaning = find_precision(precision)
        policy = MixedPrecisionPolicy()
        if meaning is not None and meaning.is_mixed:
            policy = MixedPrecisionPolicy(meaning.compute_dtype(), torch.float32)
        # What holds all parameters: a LightningModule itself is called by `training_step`, around FSDP2's hooks.
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        root = children[0] if len(children) == 1 else module
        for block in compile_targets(module, CompileOptions(regional=True)):
            if block not in (module, root):
                fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self._reshards)
        fully_shard(root, mesh=mesh, mp_policy=policy)


def split(module: LightningModule, mesh: DeviceMesh) -> None:
    """Split the matrices of a module's plan over a mesh's devices; each has all of the other parameters.

    Raises:
        UsageError: the module has no plan, or it names what is not there.
    """
    plan_of: Callable[[int], dict[str, Any]] | None = getattr(module, "tensor_parallel_plan", None)
    if plan_of is None:
        raise UsageError(
            f"{type(module).__name__} cannot be split over devices: it has no tensor_parallel_plan(size), and its "
            "configure_model does not split it"
        )
    styles = {}
    for name, style in plan_of(mesh.size()).items():
        if isinstance(style, str) and style not in _STYLES:
            raise unknown("style of tensor_parallel_plan", style, _STYLES)
        styles[name] = _STYLES[style]() if isinstance(style, str) else style
        if not any(fnmatch(known, name) for known, _ in module.named_modules()):
            raise UsageError(f"tensor_parallel_plan names {name}, and {type(module).__name__} has no such layer")
    parallelize_module(module, mesh, styles)
    # All are of one kind then: an optimizer step, and a norm of all gradients, take no mixture. By identity, since
    # layers may share a parameter.
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for part in list(module.modules()):
        whole = [(name, own) for name, own in part.named_parameters(recurse=False) if not isinstance(own, DTensor)]
        for name, own in whole:
            if own not in copies:
                copies[own] = nn.Parameter(distribute_tensor(own.data, mesh, [Replicate()]), own.requires_grad)
            part.register_parameter(name, copies[own])
        if whole:
            part.register_forward_pre_hook(lambda _, inputs: tuple(_as_copies(each, mesh) for each in inputs))
            part.register_forward_hook(lambda *called: called[-1].to_local())


def _as_copies(value: Any, mesh: DeviceMesh) -> Any:
    return DTensor.from_local(value, mesh, [Replicate()]) if isinstance(value, Tensor) else value


#: The strategies that lmbench knows by name; Lightning has more.
STRATEGIES = ("auto", "ddp", "fsdp2", "fsdp2_zero2", "tensor_parallel")
StrategyRegistry.register("fsdp2", ModelParallel)
# As ZeRO's stage 2: parameters stay gathered until the backward is over.
StrategyRegistry.register("fsdp2_zero2", ModelParallel, reshard_after_forward=False)
StrategyRegistry.register("tensor_parallel", ModelParallel, tensor_parallel_size="auto")
