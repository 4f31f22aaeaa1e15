"""Which operators a step calls on what: from PyTorch's profiler, which sees them before and after autocast.

Nothing of the step is changed for it: no tensor is wrapped, and code in C++ is seen as well.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lmbench.dtypes.recording.autocast import name_of
from lmbench.instruments.ranges import ModuleRanges, StepRanges
from lmbench.records.vocabulary import MODULE, PHASE

#: What makes no value from values, though it takes a tensor.
_FACTORIES = ("aten::empty", "aten::zeros", "aten::ones", "aten::full", "aten::new_", "aten::rand", "aten::_local")
_CASTS = ("aten::to", "aten::_to_copy", "aten::type_as")


@dataclass(frozen=True)
class OperatorCall:
    """Calls of an operator within a module that are alike.

    `inputs` are the dtypes of its tensors; `ran_on` those that autocast made of them, None where it did nothing.
    `cast_to` is what the code asked for. Numbers, and tensors without dimensions beside others, are left out: they do
    not decide what comes out.
    """

    path: str
    name: str
    inputs: tuple[str, ...]
    ran_on: tuple[str, ...] | None
    within: str | None = None
    cast_to: str | None = None


class OperatorRecording:
    """Records the operators of a module's forward, from `start` to `stop`.

    Args:
        module: whose modules are told apart.
        listed: operators that autocast handles on the device.
        takes_all: also what is called outside of the phase `forward`: there is none where a module optimizes by hand.
    """

    def __init__(self, module: nn.Module, listed: frozenset[str], takes_all: bool) -> None:
        self._module, self._listed, self._takes_all = module, listed, takes_all

    def start(self, step: int, phase: str) -> None:
        """A step begins. Raises RuntimeError where a profiler is on."""
        if torch.autograd.profiler._is_profiler_enabled:
            raise RuntimeError("another profiler is running in this process")
        # Kineto tells of its beginning and end, as if they were errors.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        self._profile.start()
        self._modules = ModuleRanges(self._module, uses_nvtx=False)
        self._ranges = StepRanges(uses_nvtx=False)
        self._ranges.begin(step, phase)

    def border(self, phase: str) -> None:
        """Within the step a phase begins."""
        self._ranges.border(phase)

    def stop(self) -> Counter[OperatorCall]:
        """The calls that there were, in the order of their first."""
        self._ranges.end()
        self._modules.remove()
        self._profile.stop()
        results: Any = self._profile.profiler.kineto_results  # type: ignore[union-attr]
        return Counter(self._calls(results.experimental_event_tree()))

    def _calls(self, roots: Sequence[Any]) -> Iterator[OperatorCall]:
        waiting = [(node, "", "") for node in reversed(roots)]
        while waiting:
            node, path, phase = waiting.pop()
            name: str = node.name
            if name.startswith(MODULE):
                path = name.removeprefix(MODULE)
            elif name.startswith(PHASE):
                phase = name.removeprefix(PHASE)
            elif name.startswith(("autograd::", "Optimizer.")):
                continue
            elif _is_operator(node):
                if phase == "forward" or (self._takes_all and phase == "other"):
                    yield from _operator(node, path, self._listed)
                continue
            waiting += [(child, path, phase) for child in reversed(node.children)]


def _is_operator(node: Any) -> bool:
    return "::" in node.name and getattr(node.extra_fields, "inputs", None) is not None


def _operator(node: Any, path: str, listed: frozenset[str], within: str | None = None) -> Iterator[OperatorCall]:
    name, inputs = node.name, _dtypes(node)
    if not inputs or name.startswith(_FACTORIES):
        return
    if name in _CASTS:
        made = _copied_to(node)
        if made is not None and made != inputs[0]:
            yield OperatorCall(path, name, inputs[:1], None, within, made)
        return
    again = next((child for child in _operators_in(node) if child.name == name), None)
    if again is not None and name in listed:
        # Autocast hands it on, casts done.
        yield OperatorCall(path, name, inputs, _dtypes(again), within)
        return
    inner = (call for child in _operators_in(node) for call in _operator(child, path, listed, name))
    if parts := [call for call in inner if call.ran_on is not None]:
        # An operator made of others, of which autocast knows some.
        yield from parts
    elif not _is_view(name):
        yield OperatorCall(path, name, inputs, None, within)


def _operators_in(node: Any) -> Iterator[Any]:
    return (child for child in node.children if _is_operator(child))


def _dtypes(node: Any) -> tuple[str, ...]:
    given = [each for value in node.extra_fields.inputs for each in (value if isinstance(value, list) else (value,))]
    tensors = [each for each in given if isinstance(getattr(each, "dtype", None), torch.dtype)]
    with_sizes = [each for each in tensors if each.sizes]
    # A number beside tensors without dimensions is float64 among others.
    deciding = with_sizes or [each for each in tensors if each.dtype != torch.float64] or tensors
    return tuple(name_of(each.dtype) for each in deciding)


def _copied_to(node: Any) -> str | None:
    """What a cast made; None where there was nothing to do."""
    for child in _operators_in(node):
        if child.name == "aten::copy_":
            return _dtypes(child)[0]
        if (found := _copied_to(child)) is not None:
            return found
    return None


@cache
def _is_view(name: str) -> bool:
    """Whether an operator only looks at its tensor in another way, or gives no tensor."""
    namespace, _, plain = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), plain, None)
    if packet is None:
        return False
    returned = [each for overload in packet.overloads() for each in getattr(packet, overload)._schema.returns]
    if not any("Tensor" in str(each.type) for each in returned):
        return True
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returned)
