"""What the blocks of a history are for, noted while it is recorded: by the storages of tensors whose use is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lmbench.memory.history import state_of
from lmbench.memory.recorded import BACKWARD, MOMENT, NotedBlock, block_of

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

    def note_state(self, optimizers: Iterable[Optimizer]) -> None:
        """Parameters with buffers, gradients that are there, and the optimizers' state."""
        self._note(state_of(self._module, optimizers))

    def note_gradients(self) -> None:
        """The parameters' gradients."""
        self._note({"gradients": state_of(self._module, [])["gradients"]})

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
