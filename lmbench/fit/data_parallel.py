"""The strategy `ddp` of `--trainer.strategy`: DistributedDataParallel, built as a plain PyTorch loop builds it."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel


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
        super().__init__(
            ddp_comm_hook=bf16_compress_hook if reduce_dtype == "bfloat16" else None,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
        )

    def _setup_model(self, model: Module) -> DistributedDataParallel:
        return self.wrap(model)

    def wrap(self, module: Module) -> DistributedDataParallel:
        """The module within DistributedDataParallel, with this strategy's options, on the current stream."""
        options: dict[str, Any] = self._ddp_kwargs
        return DistributedDataParallel(module, self.determine_ddp_device_ids(), **options)
