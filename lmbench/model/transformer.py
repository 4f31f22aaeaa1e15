"""The decoder-only Transformer as plain PyTorch modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmbench.errors import UsageError
from lmbench.model.attention import Attention, AttentionKind, Tables, attention_kind, keep_mask
from lmbench.model.layers import (
    Embedding,
    NextTokenLoss,
    Projection,
    Residual,
    RMSNorm,
    SwiGLU,
    convert_projections,
    rope_tables,
)  # fmt: skip
from lmbench.sizes import ModelShape

#: Number of chunks of tokens in a chunked loss. The author of Inductor's auto-chunker measured a head with its loss:
#: 36.2 ms and 9.2 GB whole, 40.4 ms and 3.1 GB in 8 chunks, 56.7 ms and 1.4 GB in 64 (pytorch/pytorch#124480).
LOSS_CHUNKS = 8


class Block(nn.Module):
    """One pre-norm layer: attention, then feed-forward, each added to the residual stream (``batch seq embed``)."""

    def __init__(self, shape: ModelShape, kind: AttentionKind, fused: bool | str) -> None:
        super().__init__()
        # Each of the 2 * num_layers branches adds its variance to the residual stream. GPT-2's scaling keeps the sum
        # at one.
        residual_scale = (2 * shape.num_layers) ** -0.5
        self.attention_norm = RMSNorm(shape.d_model)
        self.attention = Attention(shape, kind, residual_scale, bool(fused))
        self.attention_residual = Residual()
        self.ffn_norm = RMSNorm(shape.d_model)
        self.ffn = SwiGLU(shape.d_model, shape.d_ff, residual_scale, fused is True)
        self.ffn_residual = Residual()

    def forward(self, x: Tensor, tables: Tables) -> Any:
        x = self.attention_residual(x, self.attention(self.attention_norm(x), tables))
        return self.ffn_residual(x, self.ffn(self.ffn_norm(x)))


class Transformer(nn.Module):
    """Decoder-only language model: tokens ``batch seq`` -> logits ``batch seq vocab``, or the loss.

    Parameters are built in float32 on the current device. The head's weights are small enough that a fresh model's loss
    is about ln(vocab) + 0.125. Tables for positions and mask are built once, for ``context_length``.

    Args:
        residual_dtype: dtype of the residual stream under autocast; None keeps the embedding's.
        fused: one product computes q, k and v, and another one gate and up; with `qkv` only the first.
        is_chunked: the loss is computed in checkpointed chunks of tokens, so that only one chunk's logits are in
            memory.

    Raises:
        UsageError: unknown attention, or (in forward) a sequence longer than ``context_length``.
    """

    cos: Tensor
    sin: Tensor
    mask: Any

    def __init__(
        self,
        shape: ModelShape,
        context_length: int,
        attention: str = "sdpa",
        *,
        residual_dtype: torch.dtype | None = None,
        fused: bool | str = False,
        is_chunked: bool = False,
    ) -> None:
        super().__init__()
        self._kind = attention_kind(attention)
        self.context_length, self.fused, self._is_chunked = context_length, fused, is_chunked
        self.embedding = Embedding(shape.vocab_size, shape.d_model, residual_dtype)
        self.blocks = nn.ModuleList(Block(shape, self._kind, fused) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.d_model)
        self.head = Projection(shape.d_model, shape.vocab_size, 0.5 * shape.d_model**-0.5)
        self.loss = NextTokenLoss()
        cos, sin = rope_tables(context_length, shape.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        keep_mask(self, self._kind.mask(context_length, is_causal=True))
        self.register_load_state_dict_pre_hook(convert_projections)  # type: ignore[no-untyped-call]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        """Logits, or with targets (``batch seq``) the mean cross entropy. torch.compile gets both as one region."""
        x = self.embedding(tokens)
        tables = self._tables(x)
        with self._kind.chosen():
            for block in self.blocks:
                x = block(x, tables)
        x = self.norm(x)
        if targets is None:
            return self.head(x)
        if not self._is_chunked:
            return self._loss_of(x, targets)
        chunks = zip(x.flatten(0, 1).chunk(LOSS_CHUNKS), targets.flatten().chunk(LOSS_CHUNKS), strict=True)
        settings: Any = {"use_reentrant": False, "preserve_rng_state": False}
        losses = [checkpoint(self._loss_of, *chunk, **settings) * chunk[1].numel() for chunk in chunks]
        return torch.stack(losses).sum() / targets.numel()

    def _loss_of(self, x: Tensor, targets: Tensor) -> Any:
        return self.loss(self.head(x), targets)

    def _tables(self, x: Tensor) -> Tables:
        """The tables for the length of x, cast once per pass to the dtype of queries and keys."""
        seq = x.shape[1]
        if seq > self.context_length:
            raise UsageError(
                f"a sequence of {seq} tokens is longer than the model's context_length {self.context_length}"
            )
        mask, device, dtype = self.mask, x.device.type, x.dtype
        # The meta device has no autocast and raises when asked. `is_autocast_available` breaks the graph of torch 2.11.
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        if isinstance(mask, Tensor):
            mask = mask[:seq, :seq]
        elif mask is not None and (seq != self.context_length or mask.kv_indices.device != x.device):
            mask = self._kind.mask(seq, True, x.device)
        return Tables(self.cos[:seq].to(dtype), self.sin[:seq].to(dtype), mask)
