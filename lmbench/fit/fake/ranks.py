"""A process group in which only rank 0 exists, so that a strategy works on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.trainer.connectors import data_connector
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from lmbench.memory.allocator import Allocation
from lmbench.memory.blocks import Category
from lmbench.memory.tracker import Tracker

#: FSDP2's functions that allocate: their owner, their name, and the category of their allocations.
_FSDP2: tuple[tuple[Any, str, Category], ...] = (
    (FSDPParamGroup, "unshard", "gathered"),
    (FSDPParamGroup, "wait_for_unshard", "gathered"),
    (_fsdp_param_group, "foreach_reduce", "buckets"),
)


class FirstRank(LightningEnvironment):
    """The environment of rank 0 on node 0, whatever launcher started this process."""

    creates_processes_externally = True

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0


@contextmanager
def fake_ranks(world_size: int, tracker: Tracker) -> Iterator[None]:
    """Within, a fake process group of `world_size` ranks, with FSDP2 and DTensor patched for the tracker."""
    propagate, coordinates = ShardingPropagator._propagate_tensor_meta_non_cached, DeviceMesh._compute_coordinate_on_dim
    with ExitStack() as stack:
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        stack.callback(distributed.destroy_process_group)
        stack.enter_context(tracker.resizing())
        # DTensor makes full-size tensors to learn an operator's output; no GPU would allocate them.
        stack.enter_context(patch.object(ShardingPropagator, propagate.__name__, tracker.paused()(propagate)))
        # A device mesh reads values of its tensor, which a fake tensor does not have.
        stack.enter_context(patch.object(DeviceMesh, coordinates.__name__, _disable_current_modes()(coordinates)))
        # The original would make a gloo process group.
        stack.enter_context(patch.object(data_connector, "_InfiniteBarrier", nullcontext))
        for owner, name, category in _FSDP2:
            function = tracker.making(category)(getattr(owner, name))
            stack.enter_context(patch.object(owner, name, function))
        yield


def act_as_one_rank(strategy: ParallelStrategy, tracker: Tracker) -> None:
    """Patch a strategy before its set-up, so that it works on fake tensors within `fake_ranks`."""
    patched: Any = strategy
    patched.setup_environment = _disable_current_modes()(strategy.setup_environment)
    patched.broadcast = lambda value, src=0: value
    patched.barrier = lambda *_: None
    if isinstance(strategy, DDPStrategy):
        options = strategy._ddp_kwargs
        rebuilds = options.get("static_graph") or not options.get("find_unused_parameters")
        # These options read values of tensors. They change when gradients are reduced, not the memory for that.
        options.update(init_sync=False, static_graph=False, find_unused_parameters=False)
        configure = strategy.configure_ddp

        def configure_ddp() -> None:
            with tracker.making("buckets"):
                configure()
            # The strategies that teach do without DistributedDataParallel.
            if isinstance(strategy.model, DistributedDataParallel):
                _Buckets(strategy.model, tracker, bool(rebuilds))

        patched.configure_ddp = configure_ddp


class _Buckets:
    """Stands in for DDP's reducer, which reads values of tensors when it rebuilds its buckets.

    DDP learns the order of gradients in the first synchronized backward, and makes all buckets anew before the next
    forward. NCCL holds the first buckets until its watchdog has seen their reduction end and a collective is called
    again. Here they are freed at the second step's first all-reduce. On an H200 (torch 2.11, one rank) that varied: one
    run of the large model took 69.90 GiB with the first buckets, another 66.29 GiB without them. With steps of 20 ms
    they stayed up to the third step.
    """

    def __init__(self, module: Any, tracker: Tracker, rebuilds: bool) -> None:
        self._reducer, self._tracker = module.reducer, tracker
        self._gradient_bytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        self._is_rebuilt = not rebuilds
        self._has_reduced = False
        self._first_buckets: Allocation | None = None
        module.reducer = self
        # A lambda, since DDP refuses a hook with annotations other than its own types.
        module.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        if self._has_reduced and not self._is_rebuilt:
            self._is_rebuilt = True
            self._first_buckets = self._tracker.allocate(self._gradient_bytes, "buckets", "DDP's first buckets")
        return False

    def _reduce(self, bucket: Any) -> Any:
        self._has_reduced = True
        if self._first_buckets is not None:
            self._tracker.free(self._first_buckets)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future
