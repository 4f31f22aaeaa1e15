"""What the blocks of a history are for, noted while it is recorded: by the storages of tensors whose use is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lmbench.memory.categories import Category
from lmbench.memory.recorded import BACKWARD, MOMENT, WORKSPACES, Moment, NotedBlock, NotedOutput

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
        self.moments: list[Moment] = []
        self._module, self._device, self._vocab_size = module, device, vocab_size
        self._owners = {id(p): name.rpartition(".")[0] for name, p in module.named_parameters()}
        self._saved: dict[int, Category] = {}
        self._hooks: saved_tensors_hooks | None = None
        self._handles: list[RemovableHandle] = []

    def watch(self) -> None:
        """Look at what modules return, until `close`."""
        for name, child in self._module.named_modules():
            # TorchScript's modules take no hooks.
            if name and not isinstance(child, torch.jit.ScriptModule):
                self._handles.append(child.register_forward_hook(self._watcher(name)))

    def close(self) -> None:
        """Take every hook away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._leave()

    # moments

    def note_state(self, optimizers: Iterable[Optimizer]) -> None:
        """Parameters with buffers, gradients that are there, and the optimizers' state."""
        found: list[NotedBlock] = []
        tensors = [*self._module.named_parameters(), *self._module.named_buffers()]
        found += self._blocks(((name.rpartition(".")[0], tensor) for name, tensor in tensors), "parameters")
        found += self._gradients()
        state = (
            (self._owners.get(id(parameter), ""), tensor)
            for optimizer in optimizers
            for parameter, values in optimizer.state.items()
            for tensor in tree_leaves(values)
        )
        self._note(found + self._blocks(state, "optimizer_state"))

    def note_gradients(self) -> None:
        """The parameters' gradients."""
        self._note(self._gradients())

    def note_inputs(self, batch: Any) -> None:
        """The tensors of a batch."""
        self._note(self._blocks((("", leaf) for leaf in tree_leaves(batch)), "inputs"))

    def watch_saving(self) -> None:
        """From here on what autograd saves is looked at, until `note_saved`."""
        self._saved.clear()
        self._leave()
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def note_saved(self, result: Any) -> None:
        """What was saved for the backward of a result, each with the operator that saved it."""
        if self._hooks is None:
            return
        self._leave()
        operators = _operators(result)
        blocks = [
            NotedBlock(address, _category(known, operators.get(address, "")), "", operators.get(address, ""))
            for address, known in self._saved.items()
        ]
        self._note(blocks)

    def drop_workspaces(self, drop: Callable[[], None]) -> None:
        """Let the allocator's history see the workspaces go."""
        with record_function(WORKSPACES):
            drop()

    # parts

    def _note(self, blocks: list[NotedBlock], outputs: Sequence[NotedOutput] = ()) -> None:
        if not blocks and not outputs:
            return
        with record_function(f"{MOMENT}{len(self.moments)}"):
            pass
        self.moments.append(Moment(blocks, list(outputs)))

    def _gradients(self) -> list[NotedBlock]:
        named = ((name.rpartition(".")[0], p.grad) for name, p in self._module.named_parameters())
        return self._blocks(named, "gradients")

    def _blocks(self, named: Iterable[tuple[str, Any]], category: Category) -> list[NotedBlock]:
        found: dict[int, NotedBlock] = {}
        for owner, tensor in named:
            address = self._address(tensor)
            if address:
                found.setdefault(address, NotedBlock(address, category, owner))
        return list(found.values())

    def _address(self, tensor: Any) -> int:
        """Where a tensor's storage begins; 0 of what has none on this device."""
        if not isinstance(tensor, Tensor) or tensor.device.type != self._device.type:
            return 0
        try:
            return tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):
            # A tensor that only wraps others, or has no memory.
            return 0

    def _pack(self, tensor: Tensor) -> Tensor:
        address = self._address(tensor)
        if address and self._saved.get(address) != "logits":
            self._saved[address] = "logits" if self._is_logits(tensor) else "activations"
        return tensor

    def _is_logits(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape[-1] == self._vocab_size

    def _leave(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def _watcher(self, name: str) -> Callable[..., None]:
        is_listed = name.rpartition(".")[2].isdecimal()

        def watch(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) and output else output
            address = self._address(first)
            if not address:
                return
            if first.requires_grad and not getattr(first, _MARKED, False):
                # A module inside, whose output it is too, was first.
                setattr(first, _MARKED, True)
                first.register_hook(lambda gradient: _mark(name))
            # At once: in the next moment another tensor may lie there.
            if is_listed:
                self._note([], [NotedOutput(name, address, tuple(first.shape), first.element_size())])
            if self._is_logits(first):
                self._note([NotedBlock(address, "logits", name)])
                if first.requires_grad:
                    first.register_hook(lambda gradient: self._note_gradient_of_logits(name, gradient))

        return watch

    def _note_gradient_of_logits(self, name: str, gradient: Tensor) -> None:
        self._note(self._blocks([(name, gradient)], "logits"))


def _mark(name: str) -> None:
    with record_function(f"{BACKWARD}{name}"):
        pass


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _category(known: Category, operator: str) -> Category:
    return "logits" if operator.startswith(_OF_LOSS) else known


def _operators(result: Any) -> dict[int, str]:
    """By address of a storage, the operator that saved it for the backward of a result."""
    found: dict[int, str] = {}
    waiting = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen: set[Node] = set(waiting)
    while waiting:
        node = waiting.pop()
        for tensor in _saved_by(node):
            # The walk goes backwards: of several, whoever made the tensor comes last.
            found[tensor.untyped_storage().data_ptr()] = node.name()
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def _saved_by(node: Node) -> Iterable[Tensor]:
    """What a node of the graph saved, as far as it went through this module's hooks: nothing is unpacked, which would
    make a checkpoint compute again."""
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            raw = getattr(node, name)
        except RuntimeError:
            # Its backward has run already.
            continue
        for saved in raw if isinstance(raw, tuple | list) else (raw,):
            # `data` and `unpack_hook` are known since PyTorch 2.9.
            if getattr(saved, "unpack_hook", None) is _unpack and isinstance(saved.data, Tensor):
                yield saved.data
