"""The recording of device memory: notes on what the blocks of its history are for, and the size of what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lmbench.instruments.module_parts import hooked_modules
from lmbench.instruments.subject import tensors_of
from lmbench.memory.blocks import (
    BACKWARD,
    MOMENT,
    Category,
    NotedBlock,
    rounded_bytes,
)


class Held(NamedTuple):
    """Bytes on the accelerator, as the allocator rounds them; a shared storage counts once."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int


def state_of(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[Category, list[tuple[str, Any]]]:
    """Tensors by category, each with its name: parameters with buffers, gradients, and the optimizers' state.

    A gradient and an optimizer's state have the name of their parameter.
    """
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


def held_by(module: nn.Module, optimizers: Iterable[Optimizer], device_type: str) -> Held:
    """The bytes of parameters with buffers, gradients and optimizer state on devices of a type."""
    seen = set[int]()
    sizes = []
    for named in state_of(module, optimizers).values():
        tensors = [tensor for _, tensor in named if isinstance(tensor, Tensor) and tensor.device.type == device_type]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        sizes.append(sum(rounded_bytes(size) for address, size in storages.items() if address not in seen))
        seen.update(storages)
    return Held(*sizes)


#: Nodes of the loss that save tensors of the logits' size.
_LOSS_NODES = ("LogSoftmaxBackward", "NllLossBackward", "CrossEntropyLossBackward")


#: The attribute of tensors that already have a hook to mark the backward of a module.
_MARKED = "_lmbench_marked"


class Ledger:
    """Notes what the tensors of a training are for, at moments that ranges mark in the history.

    Args:
        module: the trained module.
        device: tensors on devices of another type are not noted.
        vocab_size: a floating tensor whose last dimension has this size counts as logits; None if it is unknown.
    """

    def __init__(self, module: nn.Module, device: torch.device, vocab_size: int | None) -> None:
        self.moments = list[list[NotedBlock]]()
        self._module, self._device, self._vocab_size = module, device, vocab_size
        self._saved = dict[int, NotedBlock]()
        #: The hooks of modules, and those of saved tensors.
        self._hooks, self._saving = ExitStack(), ExitStack()

    def watch(self) -> None:
        """Note the outputs of modules until `close`."""
        for name, child in hooked_modules(self._module):
            self._hooks.callback(child.register_forward_hook(partial(self._returned, name)).remove)

    def close(self) -> None:
        """Remove all hooks."""
        self._hooks.close()
        self._saving.close()

    # moments

    def note_state(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Note parameters with buffers, existing gradients, and the optimizers' state."""
        self._note(state_of(self._module, optimizers))

    def note_batch(self, batch: Any) -> None:
        """Note the tensors of a batch, and watch which tensors autograd saves, until `note_loss`."""
        self._note({"inputs": [("", tensor) for tensor in tensors_of(batch)]})
        self._saved.clear()
        self._saving.close()
        self._saving.enter_context(saved_tensors_hooks(self._pack, _unpack))

    def note_gradients(self) -> None:
        """Note the gradients and the parameters."""
        self.note_state()

    def note_loss(self, loss: Any) -> None:
        """Note each tensor saved since `note_batch` for the backward of a loss, and the operator that saved it."""
        self._saving.close()
        operators = _operators(loss)
        for block in self._saved.values():
            block.operator = operators.get(block.address, "")
            if block.operator.startswith(_LOSS_NODES):
                block.category = "logits"
        self._keep(list(self._saved.values()))
        self._saved.clear()

    # parts

    def _keep(self, blocks: list[NotedBlock]) -> None:
        """Add a moment with these blocks, and mark it in the history."""
        if blocks:
            _mark(f"{MOMENT}{len(self.moments)}")
            self.moments.append(blocks)

    def _note(self, tensors: Mapping[Any, Iterable[tuple[str, Any]]]) -> None:
        """Note the storages of named tensors by category, each once per category; a name's prefix is its module."""
        blocks = dict[Any, NotedBlock]()
        for category, named in tensors.items():
            for name, tensor in named:
                if address := self._address(tensor):
                    blocks.setdefault((category, address), NotedBlock(address, category, name.rpartition(".")[0]))
        self._keep(list(blocks.values()))

    def _address(self, tensor: Any) -> int:
        """The address of a tensor's storage; 0 for other values, and for tensors without one on this device."""
        if isinstance(tensor, Tensor) and tensor.device.type == self._device.type:
            # Tensors that only wrap others, or have no memory, raise.
            with suppress(RuntimeError, NotImplementedError):
                return tensor.untyped_storage().data_ptr()
        return 0

    def _pack(self, tensor: Tensor) -> Tensor:
        address, is_logits = self._address(tensor), self._is_logits(tensor)
        if address and (is_logits or address not in self._saved):
            self._saved[address] = NotedBlock(address, "logits" if is_logits else "activations")
        # An operator that saves its own output would otherwise hold itself, and outlive a step without a backward.
        return tensor.detach()

    def _is_logits(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape[-1] == self._vocab_size

    def _returned(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Note the output of a module, and mark the start of its backward when the output's gradient is there."""
        tensor = output[0] if isinstance(output, tuple | list) and output else output
        address = self._address(tensor)
        if not address:
            return
        if tensor.requires_grad and not getattr(tensor, _MARKED, False):
            # A module and its last submodule may return the same tensor: the submodule, which came first, is marked.
            setattr(tensor, _MARKED, True)
            tensor.register_hook(lambda gradient: _mark(f"{BACKWARD}{name}"))
        if self._is_logits(tensor):
            # Note it at once: another tensor may have its address soon.
            self._keep([NotedBlock(address, "logits", name)])
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._keep([NotedBlock(self._address(gradient), "logits", name)]))


def _mark(name: str) -> None:
    """Record an empty range in the history."""
    with record_function(name):
        pass


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _operators(result: Any) -> dict[int, str]:
    """The operator that saved each storage for the backward of a result, by the storage's address.

    Only tensors that went through the hooks of this file are found. Nothing is unpacked: that would make a checkpoint
    compute again.
    """
    operators = dict[int, str]()
    nodes = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        for name in dir(node):
            raw = None
            # Reading it raises once the node's backward has run.
            with suppress(RuntimeError):
                raw = getattr(node, name) if name.startswith("_raw_saved_") else None
            for saved in raw if isinstance(raw, tuple | list) else (raw,):
                # `data` and `unpack_hook` exist since PyTorch 2.9.
                if getattr(saved, "unpack_hook", None) is _unpack and isinstance(saved.data, Tensor):
                    # The walk goes backwards: of several operators, the one that made the tensor comes last and stays.
                    operators[saved.data.untyped_storage().data_ptr()] = node.name()
        inputs = dict.fromkeys(function for function, _ in node.next_functions if function is not None)
        nodes += [function for function in inputs if function not in seen]
        seen.update(inputs)
    return operators
