"""What PyTorch's CUDA allocator is asked: its history, switched on, off and written, and what a device holds, also at
the moment when it has no room for more; and what the history's blocks are for, noted while it is recorded.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lmbench.instruments.clock import synchronize
from lmbench.memory.blocks import (
    BACKWARD,
    MOMENT,
    WORKSPACES,
    Category,
    CountedPeaks,
    NotedBlock,
    block_of,
    rounded_bytes,
)

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

    def peaks(self) -> CountedPeaks:
        """The allocator's own figures since they were reset."""
        stats = torch.cuda.memory_stats(self._device)
        names = ("allocated", "requested", "reserved")
        return CountedPeaks(*(stats.get(f"{name}_bytes.all.peak", 0) for name in names))

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


#: Operators that save what has the logits' size for the loss.
_OF_LOSS = ("LogSoftmaxBackward", "NllLossBackward", "CrossEntropyLossBackward")


#: An attribute of tensors whose gradient marks the backward of a module.
_MARKED = "_lmbench_marked"


class Ledger:
    """Notes moments of a module's training; each is marked in the history by a range.

    Args:
        module: what is trained.
        device: tensors of other devices are not noted.
        vocab_size: a floating tensor whose last dimension has this size is of the logits; None where nobody knows.
    """

    def __init__(self, module: nn.Module, device: torch.device, vocab_size: int | None = None) -> None:
        self.moments: list[list[NotedBlock]] = []
        self._module, self._device, self._vocab_size = module, device, vocab_size
        self._saved: dict[int, NotedBlock] = {}
        #: The hooks of modules, and those of saved tensors.
        self._hooks, self._saving = ExitStack(), ExitStack()

    def watch(self) -> None:
        """Look at what modules return, until `close`."""
        for name, child in self._module.named_modules():
            # TorchScript's modules take no hooks.
            if name and not isinstance(child, torch.jit.ScriptModule):
                self._hooks.callback(child.register_forward_hook(partial(self._returned, name)).remove)

    def close(self) -> None:
        """Take every hook away."""
        self._hooks.close()
        self._saving.close()

    # moments

    def note_state(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Parameters with buffers, gradients that are there, and the optimizers' state."""
        self._note(state_of(self._module, optimizers))

    def note_inputs(self, batch: Any) -> None:
        """The tensors of a batch."""
        self._note({"inputs": [("", leaf) for leaf in tree_leaves(batch)]})

    def watch_saving(self) -> None:
        """From here on what autograd saves is looked at, until `note_saved`."""
        self._saved.clear()
        self._saving.close()
        self._saving.enter_context(saved_tensors_hooks(self._pack, _unpack))

    def note_saved(self, result: Any) -> None:
        """What was saved for the backward of a result since `watch_saving`, each with the operator that saved it."""
        self._saving.close()
        operators = _operators(result)
        for block in self._saved.values():
            block.operator = operators.get(block.address, "")
            if block.operator.startswith(_OF_LOSS):
                block.category = "logits"
        self._keep(list(self._saved.values()))
        self._saved.clear()

    # parts

    def _keep(self, blocks: list[NotedBlock]) -> None:
        if blocks:
            _mark(f"{MOMENT}{len(self.moments)}")
            self.moments.append(blocks)

    def _note(self, tensors: Mapping[Any, Iterable[tuple[str, Any]]]) -> None:
        """The storages of named tensors by category, each once in it; a parameter's name tells its module."""
        blocks: dict[Any, NotedBlock] = {}
        for category, named in tensors.items():
            for name, tensor in named:
                if address := self._address(tensor):
                    blocks.setdefault((category, address), NotedBlock(address, category, name.rpartition(".")[0]))
        self._keep(list(blocks.values()))

    def _address(self, tensor: Any) -> int:
        """Where a tensor's storage begins; 0 of what has none on this device."""
        if isinstance(tensor, Tensor) and tensor.device.type == self._device.type:
            # A tensor that only wraps others, or has no memory, raises.
            with suppress(RuntimeError, NotImplementedError):
                return tensor.untyped_storage().data_ptr()
        return 0

    def _pack(self, tensor: Tensor) -> Tensor:
        address, is_logits = self._address(tensor), self._is_logits(tensor)
        if address and (is_logits or address not in self._saved):
            self._saved[address] = NotedBlock(address, "logits" if is_logits else "activations")
        return tensor

    def _is_logits(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape[-1] == self._vocab_size

    def _returned(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module returned its output."""
        first = output[0] if isinstance(output, tuple | list) and output else output
        if not self._address(first):
            return
        if first.requires_grad and not getattr(first, _MARKED, False):
            # A module inside, whose output it is too, was first.
            setattr(first, _MARKED, True)
            first.register_hook(lambda gradient: _mark(f"{BACKWARD}{name}"))
        # At once: in the next moment another tensor may lie there.
        if block_of(name) == name:
            self._keep([NotedBlock(self._address(first), "stream", name)])
        if self._is_logits(first):
            self._keep([NotedBlock(self._address(first), "logits", name)])
            if first.requires_grad:
                first.register_hook(lambda gradient: self._keep([NotedBlock(self._address(gradient), "logits", name)]))


def _mark(name: str) -> None:
    """An empty range in the history."""
    with record_function(name):
        pass


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _operators(result: Any) -> dict[int, str]:
    """By address of a storage, the operator that saved it for the backward of a result, as far as it went through this
    module's hooks: nothing is unpacked, which would make a checkpoint compute again."""
    operators: dict[int, str] = {}
    waiting = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for name in dir(node):
            raw = None
            # Raises once its backward has run.
            with suppress(RuntimeError):
                raw = getattr(node, name) if name.startswith("_raw_saved_") else None
            for saved in raw if isinstance(raw, tuple | list) else (raw,):
                # `data` and `unpack_hook` are known since PyTorch 2.9.
                if getattr(saved, "unpack_hook", None) is _unpack and isinstance(saved.data, Tensor):
                    # The walk goes backwards: of several, whoever made the tensor comes last.
                    operators[saved.data.untyped_storage().data_ptr()] = node.name()
        following = dict.fromkeys(function for function, _ in node.next_functions if function is not None)
        waiting += [function for function in following if function not in seen]
        seen.update(following)
    return operators
