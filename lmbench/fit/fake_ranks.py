"""Rank 0 of a group whose other ranks do not exist: its collectives take memory as real ones do, and send nothing."""

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
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from lmbench.memory.allocator import Allocation
from lmbench.memory.blocks import Category
from lmbench.memory.fake_gpu import Tracker

#: Where FSDP2 allocates, and what for.
_FSDP2: tuple[tuple[Any, str, Category], ...] = (
    (FSDPParamGroup, "unshard", "gathered"),
    (FSDPParamGroup, "wait_for_unshard", "gathered"),
    (_fsdp_param_group, "foreach_reduce", "buckets"),
)


class FirstRank(LightningEnvironment):
    """Rank 0 on node 0, started by somebody else, whatever launcher this process has."""

    creates_processes_externally = True

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0


@contextmanager
def fake_ranks(world_size: int, tracker: Tracker) -> Iterator[None]:
    """A process group of so many ranks, and FSDP2 and DTensor as the tracker has to see them."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(*args: Any) -> Any:
        # It makes tensors of the whole size, to learn what an operator returns.
        with tracker.paused():
            return propagate(*args)

    # A mesh of devices reads its values.
    coordinates = DeviceMesh._compute_coordinate_on_dim

    def with_values(mesh: DeviceMesh) -> Any:
        with _disable_current_modes():
            return coordinates(mesh)

    with ExitStack() as stack:
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        stack.callback(distributed.destroy_process_group)
        stack.enter_context(tracker.resizing())
        stack.enter_context(patch.object(ShardingPropagator, propagate.__name__, unseen))
        stack.enter_context(patch.object(DeviceMesh, coordinates.__name__, with_values))
        # It would make a group of gloo's.
        stack.enter_context(patch.object(data_connector, "_InfiniteBarrier", nullcontext))
        for owner, name, category in _FSDP2:
            function = tracker.making(category)(getattr(owner, name))
            stack.enter_context(patch.object(owner, name, function))
        yield


def act_as_one_rank(strategy: ParallelStrategy, tracker: Tracker) -> None:
    """Make a strategy that is not yet set up one of fake tensors in `fake_ranks`."""
    changed: Any = strategy
    changed.setup_environment = _disable_current_modes()(strategy.setup_environment)
    changed.broadcast = lambda value, src=0: value
    changed.barrier = lambda *_: None
    if isinstance(strategy, DDPStrategy):
        options = strategy._ddp_kwargs
        rebuilds = options.get("static_graph") or not options.get("find_unused_parameters")
        # These read values; what they change is when gradients are reduced, and not what that takes.
        options.update(init_sync=False, static_graph=False, find_unused_parameters=False)
        configure = strategy.configure_ddp

        def configure_ddp() -> None:
            with tracker.making("buckets"):
                configure()
            _Buckets(strategy.model, tracker, bool(rebuilds))

        changed.configure_ddp = configure_ddp


class _Buckets:
    """DDP's reducer, whose own way to new buckets reads values.

    From what the first synchronized backward tells of the order of gradients it makes all buckets anew before the next
    forward. NCCL holds the old ones until its watchdog has seen their reduction end and a collective is called again.
    Here that is the second step's first all-reduce: an H200 (torch 2.11, one rank) took those 69.90 GiB in one run of
    the large model, in another 66.29, without the old buckets, and with steps of 20 ms they were there up to the third.
    """

    def __init__(self, module: Any, tracker: Tracker, rebuilds: bool) -> None:
        self._reducer, self._tracker = module.reducer, tracker
        self._gradient_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        self._is_rebuilt = not rebuilds
        self._has_reduced = False
        self._old: Allocation | None = None
        module.reducer = self
        # By the annotations of a hook DDP would take it for none of its kind.
        module.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        if self._has_reduced and not self._is_rebuilt:
            self._is_rebuilt = True
            self._old = self._tracker.allocate(self._gradient_bytes, "buckets", "DDP's first buckets")
        return False

    def _reduce(self, bucket: Any) -> Any:
        self._has_reduced = True
        if self._old is not None:
            self._tracker.free(self._old)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future
