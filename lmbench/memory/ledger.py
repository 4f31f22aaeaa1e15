"""What the blocks of a history are for, noted while it is recorded: by the storages of tensors whose use is known."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lmbench.memory.history import state_of
from lmbench.memory.recorded import BACKWARD, MOMENT, Category, NotedBlock, block_of

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
        self._saved: dict[int, Category] = {}
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
        state = state_of(self._module, optimizers).items()
        self._note([block for category, named in state for block in self._blocks(named, category)])

    def note_gradients(self) -> None:
        """The parameters' gradients."""
        self._note(self._blocks(state_of(self._module, [])["gradients"], "gradients"))

    def note_inputs(self, batch: Any) -> None:
        """The tensors of a batch."""
        self._note(self._blocks((("", leaf) for leaf in tree_leaves(batch)), "inputs"))

    def watch_saving(self) -> None:
        """From here on what autograd saves is looked at, until `note_saved`."""
        self._saved.clear()
        self._saving.close()
        self._saving.enter_context(saved_tensors_hooks(self._pack, _unpack))

    def note_saved(self, result: Any) -> None:
        """What was saved for the backward of a result since `watch_saving`, each with the operator that saved it."""
        self._saving.close()
        operators, blocks = _operators(result), []
        for address, category in self._saved.items():
            operator = operators.get(address, "")
            known: Category = "logits" if operator.startswith(_OF_LOSS) else category
            blocks.append(NotedBlock(address, known, "", operator))
        self._saved.clear()
        self._note(blocks)

    # parts

    def _note(self, blocks: list[NotedBlock]) -> None:
        if blocks:
            _mark(f"{MOMENT}{len(self.moments)}")
            self.moments.append(blocks)

    def _blocks(self, named: Iterable[tuple[str, Any]], category: Category) -> list[NotedBlock]:
        """The storages of tensors on the device, each once; a parameter's name tells its module."""
        blocks: dict[int, NotedBlock] = {}
        for name, tensor in named:
            if address := self._address(tensor):
                blocks.setdefault(address, NotedBlock(address, category, name.rpartition(".")[0]))
        return list(blocks.values())

    def _address(self, tensor: Any) -> int:
        """Where a tensor's storage begins; 0 of what has none on this device."""
        if isinstance(tensor, Tensor) and tensor.device.type == self._device.type:
            # A tensor that only wraps others, or has no memory, raises.
            with suppress(RuntimeError, NotImplementedError):
                return tensor.untyped_storage().data_ptr()
        return 0

    def _pack(self, tensor: Tensor) -> Tensor:
        address = self._address(tensor)
        if address and self._saved.get(address) != "logits":
            self._saved[address] = "logits" if self._is_logits(tensor) else "activations"
        return tensor

    def _is_logits(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape[-1] == self._vocab_size

    def _returned(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module returned its output."""
        first = output[0] if isinstance(output, tuple | list) and output else output
        address = self._address(first)
        if not address:
            return
        if first.requires_grad and not getattr(first, _MARKED, False):
            # A module inside, whose output it is too, was first.
            setattr(first, _MARKED, True)
            first.register_hook(lambda gradient: _mark(f"{BACKWARD}{name}"))
        # At once: in the next moment another tensor may lie there.
        if block_of(name) == name:
            self._note([NotedBlock(address, "stream", name)])
        if self._is_logits(first):
            self._note([NotedBlock(address, "logits", name)])
            if first.requires_grad:
                first.register_hook(lambda gradient: self._note([NotedBlock(self._address(gradient), "logits", name)]))


def _mark(name: str) -> None:
    """An empty range in the history."""
    with record_function(name):
        pass


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _operators(result: Any) -> dict[int, str]:
    """By address of a storage, the operator that saved it for the backward of a result."""
    operators: dict[int, str] = {}
    waiting = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen: set[Node] = set(waiting)
    while waiting:
        node = waiting.pop()
        for tensor in _saved_by(node):
            # The walk goes backwards: of several, whoever made the tensor comes last.
            operators[tensor.untyped_storage().data_ptr()] = node.name()
        following = [function for function, _ in node.next_functions if function is not None and function not in seen]
        waiting += dict.fromkeys(following)
        seen.update(following)
    return operators


def _saved_by(node: Node) -> Iterable[Tensor]:
    """What a node of the graph saved, as far as it went through this module's hooks: nothing is unpacked, which would
    make a checkpoint compute again."""
    for name in dir(node):
        raw = None
        # Raises once its backward has run.
        with suppress(RuntimeError):
            raw = getattr(node, name) if name.startswith("_raw_saved_") else None
        for saved in raw if isinstance(raw, tuple | list) else (raw,):
            # `data` and `unpack_hook` are known since PyTorch 2.9.
            if getattr(saved, "unpack_hook", None) is _unpack and isinstance(saved.data, Tensor):
                yield saved.data
