"""What autocast does to an operator: asked of this PyTorch, by calling the operator on tiny tensors.

PyTorch tells which operators autocast handles on a device (they are registered under that device's autocast key), not
in which of its lists they are. The call shows it: autocast gives float32 tensors back in the lower precision, or
lower ones in float32, or of a mixture the wider one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import product
from typing import Any

import torch

from lmbench.dtypes.recorded import Rule

#: Shapes that operators are tried with, from the most common one.
_SHAPES = ((2, 2), (2,), (2, 2, 2), (2, 2, 2, 2), (2, 2, 2, 2, 2), ())
#: A library's own entry points believe what they are given: cuDNN's transposed convolution of a made-up call ends the
#: process (PyTorch 2.11). A model's call does not come to autocast by them.
_UNCHECKED = ("cudnn_", "miopen_", "mkldnn_")
#: Arguments that take indices or classes where others take values.
_INDICES = ("target", "index", "indices", "input_lengths", "target_lengths")


def name_of(dtype: torch.dtype) -> str:
    """A dtype as records have it: `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a record's name."""
    found: torch.dtype = getattr(torch, name)
    return found


@cache
def listed(device_type: str) -> frozenset[str]:
    """Operators that autocast handles on a device, without their overloads: `aten::linear`."""
    try:
        found = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device_type.upper()}")
    except RuntimeError:
        # No such key: there is no autocast for this kind of device.
        return frozenset()
    return frozenset(name.partition(".")[0] for name in found)


class Asking:
    """Asks about operators on one device, under autocast with one lower precision; each question is asked once.

    Args:
        device: where they are called.
        lower: autocast's dtype, None where it is off.
    """

    def __init__(self, device: torch.device, lower: torch.dtype | None) -> None:
        self._device, self._lower = device, lower
        self._rules: dict[str, Rule] = {}
        self._results: dict[tuple[str, tuple[str, ...], bool], str | None] = {}

    def rule(self, name: str) -> Rule:
        """In which of autocast's lists an operator (`aten::linear`) is on this device."""
        if self._lower is None:
            return "off"
        if name not in listed(self._device.type):
            return "none"
        if name not in self._rules:
            self._rules[name] = self._ask(name, self._lower)
        return self._rules[name]

    def gives(self, name: str, dtypes: Sequence[str], under_autocast: bool) -> str | None:
        """The dtype of what an operator makes of floating tensors of these dtypes; None where that cannot be asked."""
        question = name, tuple(dtypes), under_autocast and self._lower is not None
        if question not in self._results:
            given = [dtype_named(dtype) for dtype in dtypes]
            # Without autocast no tensor has to be there: PyTorch promotes by dtypes alone.
            device, lower = (self._device, self._lower) if question[2] else (torch.device("meta"), None)
            answer = _trial(name, device, given, lower) if given else None
            self._results[question] = None if not isinstance(answer, torch.dtype) else name_of(answer)
        return self._results[question]

    def _ask(self, name: str, lower: torch.dtype) -> Rule:
        of_float32 = _trial(name, self._device, [torch.float32], lower)
        if isinstance(of_float32, str):
            return "refused"
        if of_float32 == lower:
            return "lower"
        if of_float32 == torch.complex64:
            # The lower precision has no complex numbers; what is given in it comes back as those of float32.
            return "float32"
        of_lower = _trial(name, self._device, [lower], lower)
        if of_lower == torch.float32:
            return "float32"
        if of_lower == lower and of_float32 == torch.float32:
            return "widest"
        return "unknown"


def _trial(
    name: str, device: torch.device, dtypes: Sequence[torch.dtype], lower: torch.dtype | None
) -> torch.dtype | str | None:
    """The dtype of an operator's first floating result; the message where autocast refuses it, None where no call is
    found. Tensors have `dtypes` in turn; the last one stands for all further ones."""
    namespace, _, plain = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), plain, None)
    if packet is None or namespace != "aten" or plain.startswith(_UNCHECKED):
        # A stranger's kernel may take no tensors but those that it is meant for, and break the device.
        return None
    casting = nullcontext() if lower is None else torch.autocast(device.type, lower, cache_enabled=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with casting:
            for overload, shape in product(packet.overloads(), _SHAPES):
                operator = getattr(packet, overload)
                if any(argument.is_out for argument in operator._schema.arguments):
                    continue
                for arguments in _arguments(operator._schema, shape, device, dtypes):
                    try:
                        result = operator(*arguments)
                    except Exception as error:
                        if "unsafe to autocast" in str(error):
                            return str(error)
                        continue
                    if (found := _first_dtype(result)) is not None:
                        return found
    return None


def _first_dtype(result: Any) -> torch.dtype | None:
    for value in result if isinstance(result, tuple | list) else (result,):
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            return value.dtype
    return None


def _arguments(
    schema: Any, shape: tuple[int, ...], device: torch.device, dtypes: Sequence[torch.dtype]
) -> Iterator[list[Any]]:
    """Arguments to try: with as many optional tensors as there are dtypes, in a few ways to fill in the rest."""
    for number, has_classes in product((1, 0), (True, False)):
        tensors = _Tensors(shape, device, dtypes)
        given = [tensors.fill(a, number, has_classes) for a in schema.arguments if not a.kwarg_only]
        if _NOTHING not in map(type, given):
            yield given


class _NOTHING:
    """No value is known for an argument."""


class _Tensors:
    """Fills in the arguments of one call, one after the other."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
        self._shape, self._device = shape, device
        self._left, self._latest, self._wanted = list(dtypes), dtypes[-1], len(dtypes)
        self._taken = 0

    def fill(self, argument: Any, number: int, has_classes: bool) -> Any:
        kind = str(argument.type)
        if "Tensor" not in kind:
            return _number(kind, number, argument)
        is_optional, is_list = kind == "Optional[Tensor]", "List" in kind
        if is_optional and self._taken >= self._wanted:
            return None
        if has_classes and argument.name in _INDICES:
            values = torch.zeros(self._shape[: 1 if len(self._shape) == 2 else None], dtype=torch.int64)
            values = values.to(self._device)
        else:
            values = self._next()
        if not is_list:
            return values
        return [values, *(self._next() for _ in tuple(self._left))] if self._left else [values, values]

    def _next(self) -> torch.Tensor:
        self._taken += 1
        self._latest = self._left.pop(0) if self._left else self._latest
        return torch.full(self._shape, 0.5, device=self._device).to(self._latest)


def _number(kind: str, number: int, argument: Any) -> Any:
    """A value for an argument that is no tensor."""
    is_list = kind.startswith("List[")
    if argument.has_default_value():
        default = argument.default_value
        return [default] if is_list and not isinstance(default, list) else default
    if kind == "List[int]":
        return [2] if number else [0]
    values = {"int": number, "float": float(number), "bool": False, "number": number, "str": "ij,jk->ik"}
    return None if kind.startswith("Optional") else values.get(kind, _NOTHING())
