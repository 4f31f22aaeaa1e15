"""Causal self-attention: one set of projections, and a table of interchangeable back ends (`ATTENTION`).

The back ends agree within rounding: 1e-5 in float32, 3e-2 in bfloat16, relative to the largest value
(tests/model/test_model_attention.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmbench.errors import UsageError, import_named, unknown
from lmbench.model.layers import Projection, RotaryEmbedding, SplitParts
from lmbench.sizes import ModelShape

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

#: Called as (q, k, v, is_causal=...), with the mask behind v where its kind makes one.
Function = Callable[..., Tensor]

# Flex attention's own choice.
_FLEX_BLOCK = 128


class Tables(NamedTuple):
    """What blocks need at a sequence length: RoPE's cos and sin (`rope_tables`), and the causal mask.

    The mask is what the back end takes (`AttentionKind.make_mask`): a tensor that is True where attention is forbidden
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


class Product(nn.Module):
    """A matrix product, as a module whose kernels can be told from others."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.matmul(left, right)


class ScaleAndMask(nn.Module):
    """Divide the scores by sqrt(head_dim) and set those where the mask is True to minus infinity."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.scale = head_dim**-0.5

    def forward(self, scores: Tensor, mask: Tensor | None) -> Any:
        scaled = scores * self.scale
        # In place: the product is a fresh tensor that nothing else reads.
        return scaled if mask is None else scaled.masked_fill_(mask, float("-inf"))


class NaiveCore(nn.Module):
    """Attention by its formula, softmax(q k^T / sqrt(head_dim) + mask) v, each part a module of its own.

    Scores and weights are ``batch heads seq seq``.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.scores = Product()
        self.mask = ScaleAndMask(head_dim)
        self.softmax = nn.Softmax(dim=-1)
        self.values = Product()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        weights = self.softmax(self.mask(self.scores(q, k.transpose(-2, -1)), mask))
        return self.values(weights, v)


class FunctionCore(nn.Module):
    """Attention by a function: PyTorch's fused operator, flex attention, or the user's own."""

    def __init__(self, function: Function, is_causal: bool) -> None:
        super().__init__()
        self._function = partial(function, is_causal=is_causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return self._function(q, k, v) if mask is None else self._function(q, k, v, mask)


def causal_mask(seq: int, device: torch.device | None = None) -> Tensor:
    """True where attention is forbidden, ``seq seq``: at later positions."""
    return torch.ones(seq, seq, dtype=torch.bool, device=device).triu_(1)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None = None, *, is_causal: bool) -> Any:
    """Attention by a kernel that Inductor makes for it, causal by a mask of blocks."""
    if not torch.is_grad_enabled():
        # On a CPU it refuses tensors that could have a gradient, also where none is computed.
        q, k, v = q.detach(), k.detach(), v.detach()
    return _compiled_flex()(q, k, v, block_mask=mask)


@cache
def _compiled_flex() -> Callable[..., Any]:
    """PyTorch's flex attention, compiled by itself: as Python it would be the formula, with all scores in memory."""
    from torch.nn.attention.flex_attention import flex_attention

    # Within a module that is compiled itself it becomes a part of that. As one graph it is refused after too many
    # shapes in one process, where PyTorch would otherwise go on with the formula.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def causal_block_mask(seq: int, device: torch.device | None = None) -> BlockMask:
    """Which blocks of the scores are computed: those on the diagonal with a mask, those below it whole; with one too
    where the last row of blocks is not whole itself.

    `create_block_mask` would find that out from all scores, ``seq seq`` of them.
    """
    from torch.nn.attention.flex_attention import BlockMask

    count = -(-seq // _FLEX_BLOCK)
    lower = torch.ones(1, 1, count, count, dtype=torch.int32, device=device).tril_()
    full = lower.tril(-1)
    if seq % _FLEX_BLOCK:
        full[..., -1, :] = 0

    def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row how many blocks, and which: those come first."""
        return blocks.sum(-1, dtype=torch.int32), blocks.argsort(descending=True, stable=True).int()

    return BlockMask.from_kv_blocks(
        *ordered(lower - full),
        *ordered(full),
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=lambda batch, head, query, key: query >= key,
        seq_lengths=(seq, seq),
    )


@dataclass(frozen=True)
class AttentionKind:
    """An implementation by name.

    Attributes:
        function: computes it; None: the formula, in modules (`NaiveCore`).
        backend: of PyTorch's fused operator; None lets PyTorch choose.
        make_mask: makes the mask that it takes for causal attention, of a length and a device; None: no mask.
        is_users: whether the function is the user's own.
    """

    name: str
    function: Function | None
    backend: SDPBackend | None = None
    make_mask: Callable[[int, torch.device | None], Any] | None = None
    is_users: bool = False

    def core(self, head_dim: int, is_causal: bool) -> nn.Module:
        """The module that computes it, from q, k, v and a mask."""
        return NaiveCore(head_dim) if self.function is None else FunctionCore(self.function, is_causal)

    def chosen(self) -> AbstractContextManager[None]:
        """Lets the fused operator take this back end and no other."""
        return nullcontext() if self.backend is None else sdpa_kernel(self.backend)

    def mask(self, seq: int, is_causal: bool, device: torch.device | None = None) -> Any:
        """The mask that it takes, None where it needs none."""
        return self.make_mask(seq, device) if self.make_mask is not None and is_causal else None

    @property
    def is_compiled(self) -> bool:
        """Its kernel is made by torch.compile."""
        return self.function is flex

    @property
    def is_written_out(self) -> bool:
        """It runs as matmul, mask, softmax, matmul, whoever writes that."""
        return self.function is None or self.backend is SDPBackend.MATH

    def saved_bytes(self, size: Size, dtype: torch.dtype, has_float_softmax: bool = False) -> int | None:
        """Bytes that an eager forward pass keeps for the backward besides q, k and v: softmax's result if written out,
        output and a logsumexp for each row, in float32 at least, if fused. None where nobody knows.

        `has_float_softmax`, as under autocast on CUDA: its result is kept in float32, and in dtype for the product.
        """
        rows = size.batch * size.heads * size.seq
        if self.function is None:
            return rows * size.seq * (dtype.itemsize + (4 if has_float_softmax else 0))
        if not self.is_compiled and self.backend in (None, SDPBackend.MATH):
            return None
        # The efficient back end's logsumexp is padded (kAlignLSE in PyTorch's kernel_forward.h).
        padded = -(-size.seq // 32) * 32 if self.backend is SDPBackend.EFFICIENT_ATTENTION else size.seq
        return rows * size.head_dim * dtype.itemsize + size.batch * size.heads * padded * max(4, dtype.itemsize)


_FUSED = functional.scaled_dot_product_attention
ATTENTION = {
    kind.name: kind
    for kind in (
        AttentionKind("naive", None, make_mask=causal_mask),
        AttentionKind("sdpa", _FUSED),
        AttentionKind("sdpa_flash", _FUSED, SDPBackend.FLASH_ATTENTION),
        AttentionKind("sdpa_efficient", _FUSED, SDPBackend.EFFICIENT_ATTENTION),
        AttentionKind("sdpa_cudnn", _FUSED, SDPBackend.CUDNN_ATTENTION),
        AttentionKind("sdpa_math", _FUSED, SDPBackend.MATH),
        AttentionKind("flex", flex, make_mask=causal_block_mask),
    )
}


def attention_kind(name: str) -> AttentionKind:
    """Look an implementation up by name, or as `my_module:my_attention`.

    Raises:
        UsageError: there is none of that name; of a function: no such module or function, an error in the module's own
            code, or a function that cannot be called as PyTorch's scaled_dot_product_attention is.
    """
    if name in ATTENTION:
        return ATTENTION[name]
    if ":" not in name:
        raise unknown("attention", name, ATTENTION, ", or a function of your own, my_module:my_attention")
    option = f"--model.attention {name}"
    function: Function = import_named(option, name)
    try:
        inspect.signature(function).bind("query", "key", "value", is_causal=True)
    except TypeError as error:
        raise UsageError(
            f"{option} is called with (query, key, value, is_causal=...), as PyTorch's scaled_dot_product_attention "
            f"is: {error}"
        ) from None
    except ValueError:
        # An operator of a library has no signature: a call will show how it can be called.
        pass
    return AttentionKind(name, function, is_users=True)


def keep_mask(module: nn.Module, mask: Any) -> None:
    """Let a module have a mask as `mask`: a tensor as a buffer that no checkpoint stores, blocks as they are."""
    if mask is None or isinstance(mask, Tensor):
        module.register_buffer("mask", mask, persistent=False)
    else:
        module.mask = mask


class Attention(nn.Module):
    """Multi-head causal self-attention with rotary positions: ``batch seq embed`` -> ``batch seq embed``.

    q, k and v are one product if fused.
    """

    def __init__(self, shape: ModelShape, kind: AttentionKind, residual_scale: float, is_fused: bool = False) -> None:
        super().__init__()
        width, std = shape.d_model, shape.d_model**-0.5
        self.head_dim, self._is_fused = shape.head_dim, is_fused
        if is_fused:
            self.qkv = Projection(width, width, std, parts=3)
        else:
            self.q, self.k, self.v = (Projection(width, width, std) for _ in "qkv")
        self.rope = RotaryEmbedding()
        self.core = kind.core(shape.head_dim, True)
        self.output = Projection(width, width, std * residual_scale)

    def forward(self, x: Tensor, tables: Tables) -> Any:
        if self._is_fused:
            q, k, v = SplitParts.apply(self.qkv(x), 3)  # type: ignore[no-untyped-call]
            # A copy: v is kept for the backward pass, and as a view it would keep the q and k that rotation replaces.
            # Of `large` at batch 64 x 1024 that is 11.3 GiB less, for 0.3 % of the step (estimated from its bytes).
            q, k, v = self._rotate(q, tables), self._rotate(k, tables), v.contiguous()
        else:
            q, k, v = self._rotate(self.q(x), tables), self._rotate(self.k(x), tables), self.v(x)
        mixed = self.core(q, k, self._split(v), tables.mask)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _rotate(self, x: Tensor, tables: Tables) -> Any:
        return self.rope(self._split(x), tables.cos, tables.sin)

    def _split(self, x: Tensor) -> Any:
        """``batch seq embed`` -> ``batch heads seq head_dim``, of the heads that this device has."""
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
