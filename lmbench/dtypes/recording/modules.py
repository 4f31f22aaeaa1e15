"""What modules get and return, noted by hooks while a step runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lmbench.dtypes.recorded import NotedCall
from lmbench.dtypes.recording.autocast import name_of

#: Deeper than any batch or output is nested; what leads back into itself ends here.
_MAX_DEPTH = 12


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors of a value, in their order: of tuples, lists, sets, mappings and dataclasses, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif depth < _MAX_DEPTH and not isinstance(value, str | bytes | nn.Module | type):
        for item in _items(value):
            yield from tensors_in(item, depth + 1)


def _items(value: Any) -> list[Any]:
    try:
        if isinstance(value, Mapping):
            return list(value.values())
        if isinstance(value, tuple | list | set | frozenset):
            return list(value)
        return [getattr(value, each.name) for each in fields(value)] if is_dataclass(value) else []
    except Exception:
        # Somebody's own container that cannot be looked into; the step goes on.
        return []


def dtypes_in(value: Any) -> tuple[str, ...]:
    """The dtypes of the tensors of a value, in their order."""
    return tuple(name_of(tensor.dtype) for tensor in tensors_in(value))


def counted(tensors: Iterable[Tensor]) -> dict[str, int]:
    """How many tensors there are of each dtype, the most frequent first."""
    return dict(Counter(name_of(tensor.dtype) for tensor in tensors).most_common())


def takes_hooks(module: nn.Module) -> bool:
    """Whether a module's calls can be seen; those of TorchScript's cannot."""
    return not isinstance(module, torch.jit.ScriptModule)


class _Call:
    """One call: what went in and came out, and what gradients came back."""

    def __init__(self, inputs: tuple[str, ...]) -> None:
        self.inputs = inputs
        self.outputs: tuple[str, ...] = ()
        self.gradients: dict[int, str] = {}


class ModuleWatch:
    """Notes every call of every module of `module` (itself not), from its making until `remove`.

    Gradients are watched by hooks on the tensors that a module returns: hooks of its backward would put views into the
    graph. `autocast_dtype` is the lower precision that autocast had in a call, None where it was off in all;
    `latest_outputs` are the dtypes of what the module that ended last returned.
    """

    def __init__(self, module: nn.Module, device_type: str) -> None:
        self.autocast_dtype: torch.dtype | None = None
        self.latest_outputs: tuple[str, ...] = ()
        self._device_type = device_type
        self._calls: dict[str, list[_Call]] = {}
        self._open: dict[str, list[_Call]] = {}
        self._handles: list[RemovableHandle] = []
        for path, child in module.named_modules():
            if path and takes_hooks(child):
                self._calls[path], self._open[path] = [], []
                self._watch(path, child)

    def _watch(self, path: str, module: nn.Module) -> None:
        def begin(module: nn.Module, inputs: Any, named: Any) -> None:
            # A recomputed forward (activation checkpointing) is no call of the step's own.
            if torch._C._current_graph_task_id() == -1:
                call = _Call((*dtypes_in(inputs), *dtypes_in(named)))
                self._calls[path].append(call)
                self._open[path].append(call)
                if torch.is_autocast_enabled(self._device_type):
                    self.autocast_dtype = torch.get_autocast_dtype(self._device_type)

        def end(module: nn.Module, inputs: Any, output: Any) -> None:
            if not self._open[path]:
                return
            call = self._open[path].pop()
            returned = list(tensors_in(output))
            self.latest_outputs = call.outputs = tuple(name_of(tensor.dtype) for tensor in returned)
            for place, tensor in enumerate(returned):
                if tensor.requires_grad:
                    tensor.register_hook(_noting(call, place))

        # In front of other hooks, and behind them: what the caller gave, and what it gets.
        self._handles.append(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(end))

    def calls(self) -> dict[str, list[NotedCall]]:
        """By path, the calls that there were, those that are alike together; none of a module that never ran."""
        found = {}
        for path, calls in self._calls.items():
            alike = Counter(
                (call.inputs, call.outputs, tuple(call.gradients[place] for place in sorted(call.gradients)))
                for call in calls
            )
            found[path] = [NotedCall(n, list(i), list(o), list(g)) for (i, o, g), n in alike.items()]
        return found

    def remove(self) -> None:
        """Take every hook away."""
        for handle in self._handles:
            handle.remove()


def _noting(call: _Call, place: int) -> Any:
    def note(gradient: Tensor) -> None:
        call.gradients[place] = name_of(gradient.dtype)

    return note
