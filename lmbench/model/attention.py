"""Causal self-attention: projections, rotary positions, and a choice of back ends (`ATTENTION`).

The back ends agree up to rounding with transformers' Llama (tests/model/test_model_transformer.py), and alone with the
formula (`attention_check`).
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

#: An attention function, called as (q, k, v, is_causal=...), or as (q, k, v, mask, is_causal=...) if it takes a mask.
Function = Callable[..., Tensor]

# Flex attention's default block size.
_FLEX_BLOCK = 128


class Tables(NamedTuple):
    """Tables that blocks use for a sequence length: RoPE's cos and sin (`rope_tables`), and the causal mask.

    The mask has the form that the back end takes (`AttentionKind.make_mask`): a tensor that is True where attention is
    forbidden (``seq seq``), flex attention's BlockMask, or None.
    """

    cos: Tensor
    sin: Tensor
    mask: Any


class Size(NamedTuple):
    """The size of q, k and v: ``batch heads seq head_dim``."""

    batch: int
    heads: int
    seq: int
    head_dim: int


class Product(nn.Module):
    """A matrix product. It is a module, so that its kernels can be told from others."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.matmul(left, right)


class ScaleAndMask(nn.Module):
    """Divide the scores by sqrt(head_dim) and set those where the mask is True to minus infinity."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.scale = head_dim**-0.5

    def forward(self, scores: Tensor, mask: Tensor | None) -> Any:
        scaled = scores * self.scale
        # In place, since nothing else reads the product.
        return scaled if mask is None else scaled.masked_fill_(mask, float("-inf"))


class NaiveCore(nn.Module):
    """Attention by its formula, softmax(q k^T / sqrt(head_dim) + mask) v. Each part of it is a module.

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
    """A mask ``seq seq``, True where attention is forbidden: at later positions."""
    return torch.ones(seq, seq, dtype=torch.bool, device=device).triu_(1)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None = None, *, is_causal: bool) -> Any:
    """Attention by PyTorch's flex attention, a kernel compiled by Inductor. A BlockMask makes it causal."""
    if not torch.is_grad_enabled():
        # On a CPU flex attention refuses tensors that require a gradient, even if none is computed.
        q, k, v = q.detach(), k.detach(), v.detach()
    return _compiled_flex()(q, k, v, block_mask=mask)


@cache
def _compiled_flex() -> Callable[..., Any]:
    """Compile PyTorch's flex attention. Uncompiled it computes the formula with all scores in memory.

    A compiled module that calls it compiles it as a part of itself.
    """
    from torch.nn.attention.flex_attention import flex_attention

    # `fullgraph` raises an error after too many shapes in one process. Without it PyTorch falls back to the formula.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def causal_block_mask(seq: int, device: torch.device | None = None) -> BlockMask:
    """The blocks of the scores that causal attention computes.

    Blocks on the diagonal have a mask, and blocks below it have none. If the sequence's end cuts the last row of blocks
    off, all its blocks have a mask. PyTorch's `create_block_mask` finds the same from all ``seq seq`` scores.
    """
    from torch.nn.attention.flex_attention import BlockMask

    count = -(-seq // _FLEX_BLOCK)
    lower = torch.ones(1, 1, count, count, dtype=torch.int32, device=device).tril_()
    full = lower.tril(-1)
    if seq % _FLEX_BLOCK:
        full[..., -1, :] = 0

    def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The number of blocks in each row, and the indices of a row's blocks, those to compute first."""
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
    """An implementation of attention.

    Attributes:
        name: the name that `--model.attention` takes.
        function: computes attention; None stands for the formula in modules (`NaiveCore`).
        backend: a back end of PyTorch's fused operator; None lets PyTorch choose.
        make_mask: makes the causal mask of the function, from a length and a device; None if it takes no mask.
        is_users: whether the function comes from the user.
    """

    name: str
    function: Function | None
    backend: SDPBackend | None = None
    make_mask: Callable[[int, torch.device | None], Any] | None = None
    is_users: bool = False

    def core(self, head_dim: int, is_causal: bool) -> nn.Module:
        """The module that computes attention from q, k, v and a mask."""
        return NaiveCore(head_dim) if self.function is None else FunctionCore(self.function, is_causal)

    def chosen(self) -> AbstractContextManager[None]:
        """Within, PyTorch's fused operator takes this back end and no other."""
        return nullcontext() if self.backend is None else sdpa_kernel(self.backend)

    def mask(self, seq: int, is_causal: bool, device: torch.device | None = None) -> Any:
        """The mask that the function takes, None if it takes none."""
        return self.make_mask(seq, device) if self.make_mask is not None and is_causal else None

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile makes its kernel."""
        return self.function is flex

    @property
    def is_written_out(self) -> bool:
        """Whether it runs as matmul, mask, softmax, matmul, in lmbench's code or in PyTorch's."""
        return self.function is None or self.backend is SDPBackend.MATH

    def saved_bytes(self, size: Size, dtype: torch.dtype, has_float_softmax: bool = False) -> int | None:
        """Bytes that an eager forward pass saves for the backward pass besides q, k and v. None where unknown.

        Attention written out saves the softmax's result. Fused attention saves the output, and for each row a logsumexp
        in float32 at least. With `has_float_softmax`, as under autocast on CUDA, the softmax's result is saved twice:
        in float32, and in `dtype` for the product.
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
    """The implementation with a name, or a user's function by `my_module:my_attention`.

    Raises:
        UsageError: the name is unknown, the module or function does not exist, importing it fails, or the function
            cannot be called like PyTorch's scaled_dot_product_attention.
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
        # An operator of a library has no signature. A wrong one fails when it is first called.
        pass
    return AttentionKind(name, function, is_users=True)


def keep_mask(module: nn.Module, mask: Any) -> None:
    """Store a mask in a module as `mask`: a tensor as a buffer that checkpoints leave out, a BlockMask as it is."""
    if mask is None or isinstance(mask, Tensor):
        module.register_buffer("mask", mask, persistent=False)
    else:
        module.mask = mask


class Attention(nn.Module):
    """Multi-head causal self-attention with rotary positions: ``batch seq embed`` -> ``batch seq embed``.

    With `is_fused` one matrix product computes q, k and v.
    """

    def __init__(self, shape: ModelShape, kind: AttentionKind, residual_scale: float, is_fused: bool) -> None:
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
            # v is copied, since it is saved for the backward pass: a view would also keep q and k before rotation in
            # memory. For `large` at batch 64 x 1024 that saves 11.3 GiB and costs 0.3 % of the step (estimated from the
            # copied bytes).
            q, k, v = self._rotate(q, tables), self._rotate(k, tables), v.contiguous()
        else:
            q, k, v = self._rotate(self.q(x), tables), self._rotate(self.k(x), tables), self.v(x)
        mixed = self.core(q, k, self._split(v), tables.mask)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _rotate(self, x: Tensor, tables: Tables) -> Any:
        return self.rope(self._split(x), tables.cos, tables.sin)

    def _split(self, x: Tensor) -> Any:
        """``batch seq embed`` -> ``batch heads seq head_dim``, for the heads that are on this device."""
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
