"""Data parallel training in four plain ways, to see what DistributedDataParallel's choices are worth.

All four train the same as `ddp`. They divide gradients by the number of ranks, and all-reduce them in each step (with
accumulation: in its last micro-batch). They differ in the number of collectives, and in what hides them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class NaiveDDP(DDPStrategy):
    """All-reduces the gradients one by one, after the backward: many collectives, and nothing hides them.

    Every rank has to use the same parameters in each step.
    """

    def __init__(self) -> None:
        super().__init__()

    def configure_ddp(self) -> None:
        """Give all ranks the parameters and buffers of rank 0. The module is not wrapped."""
        self._module = cast(Any, self.model)
        #: DistributedDataParallel's switch, which `CommunicationProbe` sets too.
        self._module.require_backward_grad_sync = True
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave the gradients of all micro-batches but the last one on their rank."""
        self._module.require_backward_grad_sync = False
        try:
            yield
        finally:
            self._module.require_backward_grad_sync = True

    def post_backward(self, closure_loss: Tensor) -> None:
        if self._module.require_backward_grad_sync:
            self.synchronize()

    def synchronize(self) -> None:
        """Average the gradients over the ranks."""
        for gradient in self.gradients():
            self.begin_average(gradient).wait()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._module.parameters() if parameter.grad is not None]

    def begin_average(self, gradient: Tensor) -> Any:
        """Begin to replace a tensor by its mean over the ranks; returns the work to wait for."""
        gradient /= self.world_size
        return dist.all_reduce(gradient, async_op=True)


class FlatDDP(NaiveDDP):
    """All-reduces all gradients at once, after the backward: one collective, and a copy of the gradients."""

    def synchronize(self) -> None:
        self.begin_average(joined(self.gradients())).wait()


class OverlappedDDP(NaiveDDP):
    """All-reduces each gradient once it is computed: many collectives, beside the rest of the backward."""

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self._works = list[Any]()
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: Tensor) -> None:
        if self._module.require_backward_grad_sync and parameter.grad is not None:
            self.gradient_ready(parameter.grad)

    def gradient_ready(self, gradient: Tensor) -> None:
        """Begin to average a gradient that the backward has computed."""
        self._works.append(self.begin_average(gradient))

    def synchronize(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()


class BucketedDDP(OverlappedDDP):
    """All-reduces a bucket of gradients once they are computed: few collectives, beside the rest of the backward.

    Args:
        bucket_cap_mb: MiB of gradients that make a bucket full.
    """

    def __init__(self, bucket_cap_mb: float = 25.0) -> None:
        super().__init__()
        self._cap_bytes = bucket_cap_mb * 2**20
        self._bucket = list[Tensor]()

    def gradient_ready(self, gradient: Tensor) -> None:
        self._bucket.append(gradient)
        if sum(gradient.nbytes for gradient in self._bucket) >= self._cap_bytes:
            self._send_bucket()

    def _send_bucket(self) -> None:
        super().gradient_ready(joined(self._bucket))
        self._bucket = []

    def synchronize(self) -> None:
        if self._bucket:
            self._send_bucket()
        super().synchronize()


def joined(gradients: list[Tensor]) -> Tensor:
    """A flat tensor with the values of gradients, which become views of it."""
    flat = parameters_to_vector(gradients)
    vector_to_parameters(flat, gradients)
    return flat
