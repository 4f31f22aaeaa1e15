"""What PyTorch's CUDA allocator is asked: its history, switched on, off and written, and what a device holds, also at
the moment when it has no room for more."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lmbench.instruments.clock import synchronize
from lmbench.memory.blocks import rounded_bytes
from lmbench.memory.recorded import WORKSPACES, AllocatorPeaks, Category

#: Read by pytorch.org/memory_viz too, which knows no later one.
_PROTOCOL = 4


class CudaHistory:
    """The history of PyTorch's caching allocator on one device, with Python's stacks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, max_entries: int, *, resets_peaks: bool) -> None:
        """Forget what was, and remember up to so many entries from now on; the allocator's peaks begin anew too where
        that is wanted."""
        if resets_peaks:
            # From here on they are those of the recorded steps.
            torch.cuda.reset_peak_memory_stats(self._device)
        # Ranges of all threads: of a CUDA device the backward runs on none of Python's.
        torch.cuda.memory._record_memory_history(
            "all", "all", "python", max_entries, self._device, clear_history=True, global_record_annotations=True
        )

    def drop_workspaces(self) -> None:
        """Give back what the matrix libraries keep between calls, and let the history see it go."""
        with record_function(WORKSPACES):
            synchronize(self._device)
            torch._C._cuda_clearCublasWorkspaces()

    def peaks(self) -> AllocatorPeaks:
        """The allocator's own figures since they were reset."""
        stats = torch.cuda.memory_stats(self._device)
        names = ("allocated", "requested", "reserved")
        return AllocatorPeaks(*(stats.get(f"{name}_bytes.all.peak", 0) for name in names))

    def write(self, path: Path) -> int:
        """The history as a pickle, whole or not at all; returns its size in bytes. Raises OSError."""
        content = torch.cuda.memory._snapshot(self._device)
        unfinished = path.with_name(f".{path.name}")
        try:
            unfinished.write_bytes(pickle.dumps(content, protocol=_PROTOCOL))
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return path.stat().st_size

    def stop(self) -> None:
        """Remember nothing any more. May be called again."""
        torch.cuda.memory._record_memory_history(enabled=None, device=self._device)


class Held(NamedTuple):
    """Bytes on the accelerator, as the allocator rounds them; storages that are shared count once."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int


def state_of(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[Category, list[tuple[str, Any]]]:
    """Parameters with buffers, their gradients, and the optimizers' state; the name of each is its parameter's."""
    parameters = dict(module.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {
        "parameters": [*parameters.items(), *module.named_buffers()],
        "gradients": [(name, parameter.grad) for name, parameter in parameters.items()],
        "optimizer_state": [
            (names.get(id(parameter), ""), leaf)
            for optimizer in optimizers
            for parameter, values in optimizer.state.items()
            for leaf in tree_leaves(values)
        ],
    }


def held_by(module: nn.Module, optimizers: Iterable[Optimizer], device_type: str = "cuda") -> Held:
    """What parameters with buffers, their gradients, and the state of the optimizers take on devices of a type."""
    seen: set[int] = set()
    sizes = []
    for named in state_of(module, optimizers).values():
        tensors = [tensor for _, tensor in named if isinstance(tensor, Tensor) and tensor.device.type == device_type]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        sizes.append(sum(rounded_bytes(size) for address, size in storages.items() if address not in seen))
        seen.update(storages)
    return Held(*sizes)


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
