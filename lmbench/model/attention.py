"""Causal self-attention: one set of projections, and a table of interchangeable cores.

The cores agree within rounding: 1e-5 in float32, 3e-2 in bfloat16, relative to the largest value
(tests/model/test_model_attention.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmbench.errors import UsageError, suggest, unknown
from lmbench.imports import import_named
from lmbench.model.flex_attention import FlexCore, causal_block_mask
from lmbench.model.layers import Projection, RotaryEmbedding
from lmbench.sizes import ModelShape

Function = Callable[..., Tensor]


class Tables(NamedTuple):
    """What blocks need at a sequence length: RoPE's cos and sin (``seq head_dim/2``), and the causal mask.

    The mask is what the core takes (`AttentionKind.make_mask`): a tensor that is True where attention is forbidden
    (``seq seq``), flex attention's blocks, or nothing.
    """

    cos: Tensor
    sin: Tensor
    mask: Any


class Size(NamedTuple):
    """Of q, k and v: ``batch heads seq head_dim``."""

    batch: int
    heads: int
    seq: int
    head_dim: int


class Scores(nn.Module):
    """Query-key products: ``batch heads seq head_dim`` twice -> ``batch heads seq seq``."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        keys = k.transpose(-2, -1)
        return torch.matmul(q, keys)


class ScaleAndMask(nn.Module):
    """Divide the scores by sqrt(head_dim) and set those where the mask is True to minus infinity."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.scale = head_dim**-0.5

    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        scaled: Tensor = scores * self.scale
        # In place: the product is a fresh tensor that nothing else reads.
        return scaled if mask is None else scaled.masked_fill_(mask, float("-inf"))


class Values(nn.Module):
    """Mean of the values, weighted by attention: ``batch heads seq seq`` -> ``batch heads seq head_dim``."""

    def forward(self, weights: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(weights, v)


class NaiveCore(nn.Module):
    """Attention by its formula, softmax(q k^T / sqrt(head_dim) + mask) v, each part a module of its own."""

    def __init__(self, head_dim: int, is_causal: bool) -> None:
        super().__init__()
        self.scores = Scores()
        self.mask = ScaleAndMask(head_dim)
        self.softmax = nn.Softmax(dim=-1)
        self.values = Values()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        weights = self.softmax(self.mask(self.scores(q, k), mask))
        mixed: Tensor = self.values(weights, v)
        return mixed


class FusedCore(nn.Module):
    """Attention by PyTorch's fused operator; the model chooses its back end once per forward pass."""

    def __init__(self, head_dim: int, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)


class FunctionCore(nn.Module):
    """Attention by a function of the user's own, called as PyTorch's: `function(query, key, value, is_causal=...)`."""

    def __init__(self, function: Function, head_dim: int, is_causal: bool) -> None:
        super().__init__()
        self._function = partial(function, is_causal=is_causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        return self._function(q, k, v)


@dataclass(frozen=True)
class AttentionKind:
    """An implementation by name.

    Attributes:
        core: makes the module that computes it, of head_dim and is_causal.
        backend: of PyTorch's fused operator; None lets PyTorch choose.
        make_mask: makes the mask that the core takes for causal attention, of a length and a device; None: no mask.
        function: the user's own.
    """

    name: str
    core: Callable[[int, bool], nn.Module]
    backend: SDPBackend | None = None
    make_mask: Callable[[int, torch.device | None], Any] | None = None
    function: Function | None = None

    def chosen(self) -> AbstractContextManager[None]:
        """Lets the fused operator take this back end and no other."""
        return nullcontext() if self.backend is None else sdpa_kernel(self.backend)

    def mask(self, seq: int, is_causal: bool, device: torch.device | None = None) -> Any:
        """The mask that the core takes, None where it needs none."""
        return self.make_mask(seq, device) if self.make_mask is not None and is_causal else None

    @property
    def is_compiled(self) -> bool:
        """Its kernel is made by torch.compile."""
        return self.core is FlexCore

    @property
    def is_written_out(self) -> bool:
        """It runs as matmul, mask, softmax, matmul, whoever writes that."""
        return self.core is NaiveCore or self.backend is SDPBackend.MATH

    def saved_bytes(self, size: Size, dtype: torch.dtype, has_float_softmax: bool = False) -> int | None:
        """Bytes that an eager forward pass keeps for the backward besides q, k and v: softmax's result if written out,
        output and a logsumexp for each row, in float32 at least, if fused. None where nobody knows.

        `has_float_softmax`, as under autocast on CUDA: its result is kept in float32, and in dtype for the product.
        """
        rows = size.batch * size.heads * size.seq
        if self.core is NaiveCore:
            return rows * size.seq * (dtype.itemsize + (4 if has_float_softmax else 0))
        if not self.is_compiled and self.backend in (None, SDPBackend.MATH):
            return None
        # The efficient back end's logsumexp is padded (kAlignLSE in PyTorch's kernel_forward.h).
        padded = -(-size.seq // 32) * 32 if self.backend is SDPBackend.EFFICIENT_ATTENTION else size.seq
        return rows * size.head_dim * dtype.itemsize + size.batch * size.heads * padded * max(4, dtype.itemsize)


def causal_mask(seq: int, device: torch.device | None = None) -> Tensor:
    """True where attention is forbidden, ``seq seq``: at later positions."""
    return torch.ones(seq, seq, dtype=torch.bool, device=device).triu_(1)


ATTENTION: dict[str, AttentionKind] = {
    kind.name: kind
    for kind in (
        AttentionKind("naive", NaiveCore, make_mask=causal_mask),
        AttentionKind("sdpa", FusedCore),
        AttentionKind("sdpa_flash", FusedCore, SDPBackend.FLASH_ATTENTION),
        AttentionKind("sdpa_efficient", FusedCore, SDPBackend.EFFICIENT_ATTENTION),
        AttentionKind("sdpa_cudnn", FusedCore, SDPBackend.CUDNN_ATTENTION),
        AttentionKind("sdpa_math", FusedCore, SDPBackend.MATH),
        AttentionKind("flex", FlexCore, make_mask=causal_block_mask),
    )
}


def taken_by_pytorch(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> AttentionKind | None:
    """The back end that plain `sdpa` would take, None for one without a name here."""
    backend = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=is_causal))
    return next((kind for kind in ATTENTION.values() if kind.backend == backend), None)


def attention_kind(name: str) -> AttentionKind:
    """Look an implementation up by name, or as `my_module:my_attention`.

    Raises:
        UsageError: there is none of that name, or no such function.
    """
    if name in ATTENTION:
        return ATTENTION[name]
    if ":" in name:
        function = _load_function(name)
        return AttentionKind(name, partial(FunctionCore, function), function=function)
    raise unknown("attention", name, ATTENTION, ", or a function of your own, my_module:my_attention")


def _load_function(path: str) -> Function:
    """The function that `my_module:my_attention` names.

    Raises:
        UsageError: no such module or function, an error in the module's own code, or a function that cannot be called
            as PyTorch's scaled_dot_product_attention is.
    """
    option = f"--model.attention {path}"
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise UsageError(f"{option}: name a function with its module, as in my_module:my_attention")
    if "/" in module_name or module_name.endswith(".py"):
        raise UsageError(f"{option}: name the module as in an import, {Path(module_name).stem}:{name}, from its folder")
    module = import_named(option, module_name)
    try:
        function: Function = attrgetter(name)(module)
    except AttributeError:
        hint = suggest(name, vars(module), module_name + ":{}")
        raise UsageError(f"{option}: module {module_name} has no {name}{hint}") from None
    if isinstance(function, type) or not callable(function):
        kind = "a class" if isinstance(function, type) else f"of type {type(function).__name__}"
        raise UsageError(f"{option} is {kind}; name a function, or an instance that can be called")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # An operator of a library: a call will show how it can be called.
        return function
    try:
        signature.bind("query", "key", "value", is_causal=True)
    except TypeError as error:
        raise UsageError(
            f"{option} takes {signature} and is called with (query, key, value, is_causal=...), as PyTorch's "
            f"scaled_dot_product_attention is: {error}"
        ) from None
    return function


def keep_mask(module: nn.Module, mask: Any) -> None:
    """Let a module have a mask as `mask`: a tensor as a buffer that no checkpoint stores, blocks as they are."""
    if mask is None or isinstance(mask, Tensor):
        module.register_buffer("mask", mask, persistent=False)
    else:
        module.mask = mask


class Attention(nn.Module):
    """Multi-head causal self-attention with rotary positions: ``batch seq embed`` -> ``batch seq embed``."""

    def __init__(self, shape: ModelShape, kind: AttentionKind, residual_scale: float) -> None:
        super().__init__()
        width, std = shape.d_model, shape.d_model**-0.5
        self.num_heads = shape.num_heads
        self.q = Projection(width, width, std=std)
        self.k = Projection(width, width, std=std)
        self.v = Projection(width, width, std=std)
        self.rope = RotaryEmbedding()
        self.core = kind.core(shape.head_dim, True)
        self.output = Projection(width, width, std=std * residual_scale)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        q = self.rope(self._split(self.q(x)), tables.cos, tables.sin)
        k = self.rope(self._split(self.k(x)), tables.cos, tables.sin)
        mixed = self.core(q, k, self._split(self.v(x)), tables.mask)
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return projected

    def _split(self, x: Tensor) -> Tensor:
        """``batch seq embed`` -> ``batch heads seq head_dim``."""
        batch, seq, embed = x.shape
        return x.view(batch, seq, self.num_heads, embed // self.num_heads).transpose(1, 2)
