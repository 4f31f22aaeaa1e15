"""What a device holds for a module and its optimizers, also at the moment when it has no room for more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lmbench.memory.allocator import rounded_bytes


class Held(NamedTuple):
    """Bytes on the accelerator, as the allocator rounds them; storages that are shared count once."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int


def held_by(module: nn.Module, optimizers: Iterable[Optimizer], device_type: str = "cuda") -> Held:
    """What parameters with buffers, their gradients, and the state of the optimizers take on devices of a type."""
    seen: set[int] = set()

    def size_of(tensors: Iterable[Any]) -> int:
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in tensors if isinstance(tensor, Tensor) and tensor.device.type == device_type
        }  # fmt: skip
        size_bytes = sum(rounded_bytes(size) for address, size in storages.items() if address not in seen)
        seen.update(storages)
        return size_bytes

    return Held(
        size_of([*module.parameters(), *module.buffers()]),
        size_of(parameter.grad for parameter in module.parameters()),
        size_of(tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])),
    )


#: Told device, bytes asked for, and bytes that are free on the device.
Refused = Callable[[int, int, int], None]

_listener: list[WeakMethod[Refused]] = []


def watch_refusals(tell: Refused) -> None:
    """From now on let `tell`, and nobody who asked before, know when the allocator is refused memory by CUDA.

    It is called before the exception is raised, while all is still held. Whatever it raises itself is nobody's error.
    A method, whose object this does not keep alive: with it a Trainer would stay, and what that has on the device.
    """
    if not torch.cuda.is_available():
        return
    if not _listener:
        # PyTorch has no way to detach one.
        torch._C._cuda_attach_out_of_memory_observer(_observed)  # type: ignore[attr-defined]
    _listener[:] = [WeakMethod(tell)]


def _observed(device: int, requested_bytes: int, device_total_bytes: int, device_free_bytes: int) -> None:
    tell = _listener[0]()
    if tell is not None:
        with suppress(Exception):
            tell(device, requested_bytes, device_free_bytes)
