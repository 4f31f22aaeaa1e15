"""The strategies `fsdp2`, `fsdp2_zero2` and `tensor_parallel` of `--trainer.strategy`, under Lightning's own strategy.

They shard groups of blocks by FSDP2, split matrices over devices (tensor parallelism), or do both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lmbench.errors import UsageError, check_at_least, check_known
from lmbench.fit.mixed_precision import Fp8Precision
from lmbench.instruments.module_parts import compile_targets
from lmbench.precision import find_precision
from lmbench.records.vocabulary import Values


class SharedInput(ParallelStyle):
    """Makes a layer's input one replicated tensor for all matrices in the layer that are split by columns.

    Their gradients of the input are then summed on each device first, and communicated once.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def share(_: nn.Module, args: tuple[Any, ...], kwargs: Values) -> tuple[tuple[Any, ...], Values]:
            if args:
                return (_replicated(args[0], device_mesh), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": _replicated(kwargs["hidden_states"], device_mesh)}

        module.register_forward_pre_hook(share, with_kwargs=True)
        return module


_STYLES = {
    "colwise": ColwiseParallel, "rowwise": RowwiseParallel, "shared_input": SharedInput,
}  # fmt: skip


class ModelParallel(ModelParallelStrategy):
    """Splits matrices over groups of `tensor_parallel_size` devices, and shards the module over these groups by FSDP2.

    FSDP2 shards groups of the module's alike blocks, then the other parameters. A module that splits or shards itself
    in `configure_model` is left as it is. With bf16-mixed, sharded blocks compute on gathered bf16 parameters.

    Args:
        tensor_parallel_size: devices that compute a batch together; auto takes all devices of a node. The module's
            `tensor_parallel_plan(size)` returns a style by name of layer, with `*` as a wildcard. A style is colwise or
            rowwise for a linear layer, shared_input for a layer around several of these, or an object of
            torch.distributed.tensor.parallel.
        reshard_after_forward: free gathered parameters after the forward, and gather them again in the backward.
        blocks_per_group: alike blocks whose parameters are gathered, and whose gradients are reduced, by one
            collective. Each group takes host time in each pass; a larger group holds more gathered memory, and the
            first and the last one hide behind no computation.
        reduce_dtype: dtype in which gradients are sent; float32 adds up exact products of bf16 compute.
        reduce_each_micro_batch: reduce gradients in every micro-batch; false reduces them in the last micro-batch only,
            which takes more memory and less communication.
        prefetch: groups that are gathered ahead of the one that computes. With 0, FSDP2 decides: one in the backward,
            and in the forward what the host issues early enough.

    Raises:
        UsageError: the size does not divide the devices, or (in ``setup``) the module has no such plan.
    """

    def __init__(
        self,
        tensor_parallel_size: int | Literal["auto"] = 1,
        reshard_after_forward: bool = True,
        blocks_per_group: int = 4,
        reduce_dtype: Literal["float32", "bfloat16"] = "float32",
        reduce_each_micro_batch: bool = True,
        prefetch: int = 0,
    ) -> None:
        super().__init__(tensor_parallel_size=tensor_parallel_size)
        check_at_least(1, "trainer.strategy", blocks_per_group=blocks_per_group)
        check_at_least(0, "trainer.strategy", prefetch=prefetch)
        self._prefetch = prefetch
        self._reshards, self._reduces_each = reshard_after_forward, reduce_each_micro_batch
        self.blocks_per_group, self._reduce_dtype = blocks_per_group, getattr(torch, reduce_dtype)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        module = self.lightning_module
        if module is not None and not self._reduces_each:
            # Lightning also steps on an epoch's last batch. The bare loop of `lmbench overhead` has no epochs.
            is_epochs_last = module.trainer.fit_loop.epoch_loop._num_ready_batches_reached()
            is_last = is_epochs_last or (batch_idx + 1) % module.trainer.accumulate_grad_batches == 0
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.set_requires_gradient_sync(is_last, recurse=False)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build the module on the device, as the other strategies do, so that one seed gives the same weights.

        Lightning's strategy builds it on the host, where random numbers differ, and building takes longer.
        """
        with self.root_device, super().tensor_init_context(empty_init):
            yield

    def setup_environment(self) -> None:
        size = self.num_processes if self._tensor_parallel_size == "auto" else self._tensor_parallel_size
        count = self.num_processes * self.num_nodes
        if count % size:
            raise UsageError(f"a tensor_parallel_size of {size} does not divide {count} devices")
        self._data_parallel_size, self._tensor_parallel_size = count // size, size
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        module = self.model
        assert isinstance(module, LightningModule)
        self.parallelize(module, str(trainer.precision))
        if not is_overridden("configure_model", module):
            # Lightning requires the method, although nothing is left to shard.
            module.configure_model = lambda: None  # type: ignore[method-assign]
        super().setup(trainer)

    def parallelize(self, module: LightningModule, precision: str) -> None:
        """Split and shard a module over the mesh, unless the module has done so itself."""
        # Move first: a mesh of GPUs takes no tensors on the host.
        self.model_to_device()
        data_mesh, tensor_mesh = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        if tensor_mesh.size() > 1 and not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            split(module, tensor_mesh)
        is_sharded = any(isinstance(part, FSDPModule) for part in module.modules())
        if not is_sharded and (data_mesh.size() > 1 or tensor_mesh.size() == 1):
            if isinstance(self.precision_plugin, Fp8Precision):
                self.precision_plugin.convert_module(module)
            self._shard(module, precision, data_mesh)

    def _shard(self, module: LightningModule, precision: str, mesh: DeviceMesh) -> None:
        meaning = find_precision(precision)
        policy = MixedPrecisionPolicy()
        if meaning is not None and meaning.is_mixed:
            policy = MixedPrecisionPolicy(meaning.compute_dtype(), self._reduce_dtype)
        # The root is the only child with parameters if there is one: FSDP2's hooks run when a module is called, and
        # Lightning calls `training_step`, not the LightningModule.
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        root = children[0] if len(children) == 1 else module
        targets = compile_targets(module, is_regional=True)
        blocks = [block for block in targets if block not in (module, root)]
        for first in range(0, len(blocks), self.blocks_per_group):
            group = blocks[first : first + self.blocks_per_group]
            fully_shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=self._reshards)
        fully_shard(root, mesh=mesh, mp_policy=policy)
        if self._prefetch:
            # The first block of a group stands for the group.
            first_blocks: list[Any] = blocks[:: self.blocks_per_group]
            forward, backward = [root, *first_blocks], [root, *first_blocks[::-1]]
            for index in range(len(forward)):
                ahead = slice(index + 1, index + 1 + self._prefetch)
                forward[index].set_modules_to_forward_prefetch(forward[ahead])
                backward[index].set_modules_to_backward_prefetch(backward[ahead])


def split(module: LightningModule, mesh: DeviceMesh) -> None:
    """Split the layers of a module's plan over a mesh's devices, and replicate all other parameters.

    Raises:
        UsageError: the module has no plan, or the plan names an unknown style or layer.
    """
    plan_of: Callable[[int], Values] | None = getattr(module, "tensor_parallel_plan", None)
    if plan_of is None:
        raise UsageError(
            f"{type(module).__name__} cannot be split over devices: it has no tensor_parallel_plan(size), and its "
            "configure_model does not split it"
        )
    styles = {}
    for name, style in plan_of(mesh.size()).items():
        if isinstance(style, str):
            check_known("style of tensor_parallel_plan", style, _STYLES)
        styles[name] = _STYLES[style]() if isinstance(style, str) else style
        if not any(fnmatch(path, name) for path, _ in module.named_modules()):
            raise UsageError(f"tensor_parallel_plan names {name}, and {type(module).__name__} has no such layer")
    parallelize_module(module, mesh, styles)
    # Every parameter becomes a DTensor, since optimizer steps and gradient norms do not mix tensors and DTensors.
    # `replicas` keeps a parameter that layers share one parameter.
    replicas = dict[nn.Parameter, nn.Parameter]()
    for part in list(module.modules()):
        plain = [(name, p) for name, p in part.named_parameters(recurse=False) if not isinstance(p, DTensor)]
        for name, parameter in plain:
            if parameter not in replicas:
                replica = distribute_tensor(parameter.data, mesh, [Replicate()])
                replicas[parameter] = nn.Parameter(replica, parameter.requires_grad)
            part.register_parameter(name, replicas[parameter])
        if plain:
            part.register_forward_pre_hook(lambda _, args: tuple(_replicated(value, mesh) for value in args))
            part.register_forward_hook(lambda _, args, output: output.to_local())


def _replicated(value: Any, mesh: DeviceMesh) -> Any:
    return DTensor.from_local(value, mesh, [Replicate()]) if isinstance(value, Tensor) else value
