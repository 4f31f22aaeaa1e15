"""The strategies `ddp` and `ddp_zero1` of `--trainer.strategy`.

`ddp` is DistributedDataParallel, built as a plain PyTorch loop builds it; `ddp_zero1` also shards the optimizer.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, Literal, cast

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lmbench.errors import UsageError
from lmbench.records.vocabulary import Values


class DataParallel(DDPStrategy):
    """Trains a replica of the module on each device, and averages the gradients bucket by bucket in the backward.

    Two choices of Lightning's DDPStrategy are made otherwise. DistributedDataParallel is built on the current stream.
    Lightning builds it on a side stream, which adds a wait between streams to each gradient's accumulation. And
    gradients are views of the buckets, which spares a copy of each gradient in each step, and the memory of all
    gradients. The study `ddp_defaults` measures these choices.

    Args:
        gradient_as_bucket_view: gradients are views of the buckets that are reduced.
        static_graph: promise that each step uses the same parameters in the same order.
        bucket_cap_mb: MiB of gradients in a bucket; a bucket is reduced once all of its gradients are there.
        find_unused_parameters: look in each forward for parameters that the loss does not depend on.
        broadcast_buffers: copy the buffers of rank 0 to the other ranks before each forward.
        reduce_dtype: dtype in which gradients are sent; float32 is the dtype of the gradients.
    """

    def __init__(
        self,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        bucket_cap_mb: float = 25.0,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        reduce_dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        # torch 2.13 warns when broadcast_buffers is given, even as True, so pass it only when false.
        options: Values = {} if broadcast_buffers else {"broadcast_buffers": False}
        super().__init__(
            ddp_comm_hook=bf16_compress_hook if reduce_dtype == "bfloat16" else None,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            **options,
        )

    def _setup_model(self, model: Module) -> DistributedDataParallel:
        options: Values = self._ddp_kwargs
        return DistributedDataParallel(model, self.determine_ddp_device_ids(), **options)


class ShardedOptimizer(DataParallel):
    """DataParallel whose optimizer's state is sharded: ZeRO stage 1, by PyTorch's ZeroRedundancyOptimizer.

    Each rank updates about 1/n of the parameters and holds their state. It then broadcasts them to the others, which
    counts as phase `optimizer`. Gradients and parameters stay whole on each rank.

    Raises:
        UsageError: in ``setup``, the optimizer cannot be made again from its class and its defaults.
    """

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        sharded = {optimizer: shard(optimizer) for optimizer in self.optimizers}
        self.optimizers = [*sharded.values()]
        for config in self.lr_scheduler_configs:
            config.scheduler.optimizer = sharded[config.scheduler.optimizer]


def shard(optimizer: Optimizer) -> ZeroRedundancyOptimizer:
    """An optimizer for the same groups of parameters whose state is sharded over the ranks."""
    kind = type(optimizer)
    defaults = {name: value for name, value in optimizer.defaults.items() if name in signature(kind).parameters}
    try:
        sharded: Any = ZeroRedundancyOptimizer(optimizer.param_groups, kind, parameters_as_bucket_view=True, **defaults)
    except (TypeError, AttributeError) as error:
        raise UsageError(
            f"ddp_zero1 cannot make {kind.__name__} again for a share of the parameters: {error}"
        ) from error
    # Whoever looks for name and state, such as records and `lmbench memory`, finds those of this rank's share.
    sharded.label, sharded.state = kind.__name__, sharded.optim.state
    return cast(ZeroRedundancyOptimizer, sharded)
