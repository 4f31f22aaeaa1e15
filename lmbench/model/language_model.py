"""The Transformer as a LightningModule: what ``lmbench fit`` trains unless ``--model`` names another."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lmbench.errors import check_at_least, check_divides, unknown
from lmbench.model.attention import Size, attention_kind
from lmbench.model.attention_check import check_again, check_attention, use_in
from lmbench.model.layers import split_blocks
from lmbench.model.optimizers import choose_optimizer
from lmbench.model.transformer import CHECKPOINTS, Transformer, recomputed_flops
from lmbench.records.run import AttentionCheck
from lmbench.sizes import DEFAULT_VOCAB_SIZE, FlopCount, forward_flops, resolve_shape, size_name


class LanguageModel(LightningModule):
    """A decoder-only Transformer and its optimizer, on batches of (tokens, targets), int64 of shape ``batch seq``.

    The network is built in ``configure_model``, on the device and always from float32 weights, so that one
    seed gives the same initial weights in every precision. Steps return the loss and nothing else: no
    logging, no host sync.

    Args:
        size: a named size; the dimensions below override it one by one. With null all of them are needed.
        d_model: width of the residual stream.
        d_ff: width of the feed-forward layer.
        num_layers: number of blocks.
        num_heads: attention heads per block; must divide d_model into an even head_dim.
        vocab_size: number of token ids.
        context_length: the longest sequence, in tokens.
        attention: naive, sdpa (PyTorch chooses), sdpa_flash, sdpa_efficient, sdpa_cudnn, sdpa_math, flex, or a function
            of your own, my_module:my_attention, called as PyTorch's scaled_dot_product_attention is.
        checkpoint: which activations the backward pass computes again: none, block (all blocks), every_2 (every second
            block) or selective (everything in a block but its linear layers and fused attention).
        optimizer: any of torch.optim by name (AdamW, SGD with momentum, Muon for the hidden layers' matrices, ...).
        optimizer_variant: how it is implemented: fused (one kernel), foreach (horizontally fused) or loop (over
            parameters); null is fused for Adam, AdamW and SGD.
        learning_rate: the optimizer's learning rate.
        weight_decay: on every parameter; AdamW's is decoupled.
        betas: AdamW's averaging coefficients; the first is SGD's momentum.

    Raises:
        UsageError: a setting is out of its range, or (in ``setup``) the attention has no kernel on this
            device.
    """

    network: Transformer

    def __init__(
        self,
        *,
        size: str | None = "small",
        d_model: int | None = None,
        d_ff: int | None = None,
        num_layers: int | None = None,
        num_heads: int | None = None,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        context_length: int = 512,
        attention: str = "sdpa",
        checkpoint: str = "none",
        optimizer: str = "AdamW",
        optimizer_variant: str | None = None,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        super().__init__()
        dimensions = {"d_model": d_model, "d_ff": d_ff, "num_layers": num_layers, "num_heads": num_heads}
        self.shape = resolve_shape(size, **dimensions, vocab_size=vocab_size)
        self._kind = attention_kind(attention)
        self._attention_check: AttentionCheck | None = None
        if checkpoint not in CHECKPOINTS:
            raise unknown("checkpoint", checkpoint, CHECKPOINTS)
        check_at_least(1, context_length=context_length)
        self._is_fresh = True
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.attention = attention
        self.checkpoint = checkpoint
        self.optimizer = choose_optimizer(
            optimizer, optimizer_variant, lr=learning_rate, weight_decay=weight_decay, betas=betas
        )

    def setup(self, stage: str) -> None:
        batch_size = getattr(self.trainer.datamodule, "batch_size", 1)  # type: ignore[attr-defined]
        size = Size(batch_size, self.shape.num_heads, self.context_length, self.shape.head_dim)
        self._use = use_in(self.trainer, size, True, stage, is_strided=True)
        self._attention_check = check_attention(self._kind, self._use)

    def check_again(self) -> None:
        """After the run: is an attention of your own still right?"""
        check_again(self._kind, self._use)

    def configure_model(self) -> None:
        """Build the network once, on the current device; Lightning calls this before fit and validate."""
        self._is_fresh = not hasattr(self, "network")
        if self._is_fresh:
            self.network = Transformer(self.shape, self.context_length, self.attention, self.checkpoint)

    def forward(self, tokens: Tensor) -> Any:
        """Logits, ``batch seq vocab``."""
        return self.network(tokens)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.network(*batch)

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer.build(self.named_parameters())

    def tokens_per_batch(self, batch: tuple[Tensor, Tensor]) -> int:
        """Tokens that one batch trains on."""
        return batch[0].numel()

    def flops_per_token(self) -> FlopCount:
        """Model FLOPs of one forward pass per token, at the model's context length."""
        again = recomputed_flops(self.checkpoint, self.shape, self.context_length, self._kind.is_written_out)
        return replace(forward_flops(self.shape, self.context_length), recomputed_per_token_flops=again)

    def describe(self) -> dict[str, Any]:
        """Shape and choices, for the run's record."""
        return {
            "size": size_name(self.shape),
            **asdict(self.shape),
            "attention": self.attention,
            "attention_check": self._attention_check,
            "checkpoint": self.checkpoint,
            "optimizer": self.optimizer.label,
            # One that was trained before in this process is not.
            "is_fresh": self._is_fresh,
        }

    def tensor_parallel_plan(self, size: int) -> dict[str, str]:
        """What is split over `size` devices: each block's heads, and the width of its feed-forward layer.

        Raises:
            UsageError: it does not divide them.
        """
        check_divides(size, num_heads=self.shape.num_heads, d_ff=self.shape.d_ff)
        return split_blocks("network.blocks.*", attention="q k v output", ffn="gate up down")

    def compile_targets(self) -> list[torch.nn.Module]:
        """What ``--trainer.compile`` compiles: the network with its loss, as one region."""
        return [self.network]
