"""What a device holds for a module and its optimizers, also at the moment when it has no room for more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lmbench.memory.allocator import rounded_bytes


@dataclass(frozen=True)
class Held:
    """Bytes on the accelerator, as the allocator rounds them; storages that are shared count once."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_state_bytes


def held_by(module: nn.Module, optimizers: Iterable[Optimizer], device_type: str = "cuda") -> Held:
    """What parameters with buffers, their gradients, and the state of the optimizers take on devices of a type."""
    seen: set[int] = set()

    def size_of(tensors: Iterable[Tensor | None]) -> int:
        total = 0
        for tensor in tensors:
            if tensor is None or tensor.device.type != device_type:
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += rounded_bytes(storage.nbytes())
        return total

    states = [value for each in optimizers for state in each.state.values() for value in state.values()]
    return Held(
        parameters_bytes=size_of([*module.parameters(), *module.buffers()]),
        gradients_bytes=size_of(parameter.grad for parameter in module.parameters()),
        optimizer_state_bytes=size_of(value for value in states if isinstance(value, Tensor)),
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
