"""Attention by a function of the user's own, called as PyTorch's scaled_dot_product_attention is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path

from torch import Tensor, nn

from lmbench.errors import UsageError, suggest
from lmbench.imports import import_named

Function = Callable[..., Tensor]


class FunctionCore(nn.Module):
    """Calls `function(query, key, value, is_causal=...)`."""

    def __init__(self, function: Function, head_dim: int, is_causal: bool) -> None:
        super().__init__()
        self._function = partial(function, is_causal=is_causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        return self._function(q, k, v)


def load_function(path: str) -> Function:
    """The function that `my_module:my_attention` names.

    Raises:
        UsageError: no such module or function, an error in the module's own code, or a function that cannot be called
            so.
    """
    what = f"--model.attention {path}"
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise UsageError(f"{what}: name a function with its module, as in my_module:my_attention")
    if "/" in module_name or module_name.endswith(".py"):
        raise UsageError(f"{what}: name the module as in an import, {Path(module_name).stem}:{name}, from its folder")
    module = import_named(what, module_name)
    try:
        function = attrgetter(name)(module)
    except AttributeError:
        hint = suggest(name, vars(module), module_name + ":{}")
        raise UsageError(f"{what}: module {module_name} has no {name}{hint}") from None
    if isinstance(function, type):
        raise UsageError(f"{what} is a class; name a function, or an instance that can be called")
    if not callable(function):
        raise UsageError(f"{what} is no function but of type {type(function).__name__}")
    _check_signature(what, function)
    return function  # type: ignore[no-any-return]


def _check_signature(what: str, function: Function) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # An operator of a library: how it can be called shows when it is.
        return
    try:
        signature.bind("query", "key", "value", is_causal=True)
    except TypeError as error:
        raise UsageError(
            f"{what} takes {signature} and is called with (query, key, value, is_causal=...), as PyTorch's "
            f"scaled_dot_product_attention is: {error}"
        ) from None
