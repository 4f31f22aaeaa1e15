"""The decoder-only Transformer of lmbench's sizes, as plain PyTorch modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lmbench.errors import UsageError
from lmbench.model.attention import Attention, AttentionKind, Tables, attention_kind, keep_mask
from lmbench.model.checkpointing import CHECKPOINTS, Checkpointing, run_checkpointed
from lmbench.model.layers import Embedding, NextTokenLoss, Projection, Residual, RMSNorm, SwiGLU, rope_tables
from lmbench.sizes import ModelShape


class Block(nn.Module):
    """One pre-norm layer: attention, then feed-forward, each added to the stream (``batch seq embed``).

    `checkpoint` says what its backward pass computes again, None nothing; it is a part of the block, so that compiling
    the block compiles it too.
    """

    def __init__(self, shape: ModelShape, kind: AttentionKind, checkpoint: Checkpointing | None) -> None:
        super().__init__()
        self._checkpoint, self._kind = checkpoint, kind
        # Each of the 2 * layers branches adds its variance to the residual stream (GPT-2's scaling keeps
        # the sum at one).
        residual_scale = (2 * shape.num_layers) ** -0.5
        self.attention_norm = RMSNorm(shape.d_model)
        self.attention = Attention(shape, kind, residual_scale)
        self.attention_residual = Residual()
        self.ffn_norm = RMSNorm(shape.d_model)
        self.ffn = SwiGLU(shape.d_model, shape.d_ff, residual_scale)
        self.ffn_residual = Residual()

    def forward(self, x: Tensor, tables: Tables) -> Any:
        if self._checkpoint is None or not torch.is_grad_enabled():
            return self._run(x, tables)
        return run_checkpointed(self._checkpoint.keeps_matmuls, self._run_again, x, tables)

    def _run_again(self, x: Tensor, tables: Tables) -> Any:
        with self._kind.chosen():
            return self._run(x, tables)

    def _run(self, x: Tensor, tables: Tables) -> Any:
        x = self.attention_residual(x, self.attention(self.attention_norm(x), tables))
        return self.ffn_residual(x, self.ffn(self.ffn_norm(x)))


class Transformer(nn.Module):
    """Decoder-only language model: tokens ``batch seq`` -> logits ``batch seq vocab``, or the loss.

    Parameters are built in float32 on the current device context. The head's weights are small enough that
    a fresh model's loss is about ln(vocab) + 0.125. Tables for positions and mask are built once, for
    ``context_length``.

    Raises:
        UsageError: unknown attention, or (in forward) a sequence longer than ``context_length``.
    """

    cos: Tensor
    sin: Tensor
    mask: Any

    def __init__(
        self, shape: ModelShape, context_length: int, attention: str = "sdpa", checkpoint: str = "none"
    ) -> None:
        super().__init__()
        self._kind, checkpointing = attention_kind(attention), CHECKPOINTS[checkpoint]
        self.context_length = context_length
        self.embedding = Embedding(shape.vocab_size, shape.d_model)
        checkpointed = checkpointing.blocks(shape.num_layers)
        self.blocks = nn.ModuleList(
            Block(shape, self._kind, checkpointing if index in checkpointed else None)
            for index in range(shape.num_layers)
        )
        self.norm = RMSNorm(shape.d_model)
        self.head = Projection(shape.d_model, shape.vocab_size, 0.5 * shape.d_model**-0.5)
        self.loss = NextTokenLoss()
        for name, table in zip(("cos", "sin"), rope_tables(context_length, shape.head_dim), strict=True):
            self.register_buffer(name, table, persistent=False)
        keep_mask(self, self._kind.mask(context_length, is_causal=True))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        """Logits, or with targets (``batch seq``) the mean cross entropy: one region for torch.compile."""
        x = self.embedding(tokens)
        tables = self._tables(x)
        with self._kind.chosen():
            for block in self.blocks:
                x = block(x, tables)
        logits = self.head(self.norm(x))
        return logits if targets is None else self.loss(logits, targets)

    def _tables(self, x: Tensor) -> Tables:
        """The tables for this length, cast once per pass to the dtype that queries and keys will have."""
        seq = x.shape[1]
        if seq > self.context_length:
            raise UsageError(
                f"a sequence of {seq} tokens is longer than the model's context_length {self.context_length}"
            )
        mask, device, dtype = self.mask, x.device.type, x.dtype
        # Meta has no autocast and may not be asked; `is_autocast_available` would cut torch 2.11's graph here.
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        if isinstance(mask, Tensor):
            mask = mask[:seq, :seq]
        elif mask is not None and (seq != self.context_length or mask.kv_indices.device != x.device):
            mask = self._kind.mask(seq, True, x.device)
        return Tables(self.cos[:seq].to(dtype), self.sin[:seq].to(dtype), mask)
